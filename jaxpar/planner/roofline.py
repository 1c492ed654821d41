"""How long should a step take: each kind of work divided by its rate.

Nothing here is fitted to a run: rates are those of `jaxpar.compiled.hardware`, each
times the fraction that large transfers and matmuls reach.
"""

import dataclasses
from collections.abc import Mapping

from jaxpar.compiled.collectives import Collective
from jaxpar.compiled.link_rates import link_rates_of
from jaxpar.mesh import DATA
from jaxpar.planner.targets import Target
from jaxpar.planner.work import Traffic


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does in a step.

    Attributes:
      flops: matmul FLOPs, recomputation included.
      model_flops: the model's FLOPs: three times those of its forward pass.
      dtype: the dtype of matmuls.
      traffic: bytes through its memory.
      collectives: its collectives.
      bubble: idle fraction of the pipeline.
      zero: the ZeRO stage.
    """

    flops: float
    model_flops: float
    dtype: str
    traffic: Traffic
    collectives: tuple[Collective, ...]
    bubble: float
    zero: int


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated time of a step and its components, in seconds.

    Attributes:
      step_seconds: the step.
      mfu: the model's FLOP/s, over the peak.
      bubble: the pipeline's idle fraction.
      matmul_seconds: matmuls.
      memory_seconds: all other kernels, at the memory's rate.
      links_seconds: collectives, one after the other.
      exposed_seconds: part of these, not overlapped with other work.
      bubble_seconds: the pipeline's idle time.
    """

    step_seconds: float
    mfu: float
    bubble: float
    matmul_seconds: float
    memory_seconds: float
    links_seconds: float
    exposed_seconds: float
    bubble_seconds: float


def estimate(work: Work, target: Target, sizes: Mapping[str, int]) -> Estimate | None:
    """Estimate a step.

    Args:
      work: the work of one device.
      target: the devices.
      sizes: mesh axis -> devices on it, in the mesh's order.

    Returns:
      The estimate; None for CPUs, whose rates are unknown.
    """
    hardware = target.hardware
    if hardware is None:
        return None
    peak = hardware.peak[work.dtype]
    memory = hardware.memory_rate * hardware.memory_achieved
    products = max(
        work.flops / (peak * hardware.peak_achieved), work.traffic.products / memory
    )
    others = work.traffic.others / memory
    bubble = (products + others) * work.bubble / (1 - work.bubble)
    hidden, exposed = 0.0, 0.0
    for row in work.collectives:
        seconds = row.sent_bytes / link_rate(row.axes, target, sizes)
        if _is_hidden(row, work.zero):
            hidden += seconds
        else:
            exposed += seconds
    waited, exposed = exposed, exposed + max(0.0, hidden - products - others)
    step = products + others + bubble + exposed
    return Estimate(
        step_seconds=step,
        mfu=work.model_flops / (step * peak),
        bubble=work.bubble,
        matmul_seconds=products,
        memory_seconds=others,
        links_seconds=waited + hidden,
        exposed_seconds=exposed,
        bubble_seconds=bubble,
    )


def assumptions(target: Target) -> list[str]:
    """The assumptions of an estimate, for people."""
    hardware = target.hardware
    if hardware is None:
        return ["no rates of CPUs are known: only memory and traffic are planned."]
    return [
        f"matmuls run at {hardware.peak_achieved:.0%} of the peak of "
        f"{hardware.peak['bfloat16'] / 1e12:.0f} TFLOP/s in bf16 "
        f"({hardware.sources['peak']}).",
        f"all other kernels run at {hardware.memory_achieved:.0%} of the memory's "
        f"{hardware.memory_rate / 1e12:.2f} TB/s ({hardware.sources['memory']}).",
        f"a device sends {hardware.links_achieved:.0%} of "
        f"{hardware.inside_host / 1e9:.0f} GB/s inside its host and of "
        f"{hardware.between_hosts / 1e9:.0f} GB/s between hosts, times the members of "
        f"its group on the host ({hardware.sources['links']}).",
        "per-layer gathers and reductions over data (ZeRO 3; gradients of ZeRO 2) and "
        "the sends of a pipeline overlap with matmuls; all other collectives, and "
        "those over tensor, do not overlap.",
    ]


def link_rate(axes: tuple[str, ...], target: Target, sizes: Mapping[str, int]) -> float:
    """Bytes per second that one device sends in a collective.

    Args:
      axes: mesh axes that its groups span.
      target: the devices, not CPUs.
      sizes: mesh axis -> devices on it, in the mesh's order.
    """
    hardware = target.hardware
    assert hardware is not None, "CPUs are not estimated"
    return link_rates_of(hardware, sizes, target.devices_per_host).rate(axes)


def _is_hidden(row: Collective, zero: int) -> bool:
    if row.kind == "collective-permute":
        return True
    in_loops = zero == 3 or (zero == 2 and row.kind == "reduce-scatter")
    return row.axes == (DATA,) and in_loops
