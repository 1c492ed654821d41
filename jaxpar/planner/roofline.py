"""How long should a step take: each kind of work divided by its rate.

Nothing here is fitted to a run: rates are those of `jaxpar.compiled.hardware`, each
times the fraction that large transfers and matmuls reach.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from jaxpar.compiled.collectives import Collective
from jaxpar.compiled.exposed import Communication
from jaxpar.compiled.hardware import Hardware
from jaxpar.compiled.link_rates import LinkRates, link_rates_of
from jaxpar.mesh import DATA
from jaxpar.planner.targets import Target
from jaxpar.planner.work import Traffic
from jaxpar.step.update import NO_TRAFFIC, HostTraffic


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
      communication: the time of its collectives by the compiled schedule; None where
        there is none, and a rule says what is hidden.
      host: what the host does between the step's programs.
    """

    flops: float
    model_flops: float
    dtype: str
    traffic: Traffic
    collectives: tuple[Collective, ...]
    bubble: float
    zero: int
    communication: Communication | None = None
    host: HostTraffic = NO_TRAFFIC


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
      host_seconds: the host's update between the step's programs, by the slower of its
        memory and its disks, which work at once.
    """

    step_seconds: float
    mfu: float
    bubble: float
    matmul_seconds: float
    memory_seconds: float
    links_seconds: float
    exposed_seconds: float
    bubble_seconds: float
    host_seconds: float = 0.0


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
    if work.communication is not None:
        links = work.communication.wire_seconds
        exposed = work.communication.exposed_seconds
    else:
        rates = link_rates_of(hardware, sizes, target.devices_per_host)
        beside = products + others
        links, exposed = exposed_by_rule(work.collectives, work.zero, rates, beside)
    in_memory = work.host.memory / hardware.host_memory_rate
    host = max(in_memory, work.host.disk / hardware.disk_rate)
    step = products + others + bubble + exposed + host
    return Estimate(
        step_seconds=step,
        mfu=work.model_flops / (step * peak),
        bubble=work.bubble,
        matmul_seconds=products,
        memory_seconds=others,
        links_seconds=links,
        exposed_seconds=exposed,
        bubble_seconds=bubble,
        host_seconds=host,
    )


def exposed_by_rule(
    collectives: Iterable[Collective], zero: int, rates: LinkRates, beside: float
) -> tuple[float, float]:
    """Say by a rule what is exposed, of a program without a schedule.

    Args:
      collectives: the program's.
      zero: the ZeRO stage.
      rates: of the links.
      beside: seconds of the kernels that hide collectives.

    Returns:
      (seconds of all collectives, of those that are exposed).
    """
    hidden, waited = 0.0, 0.0
    for row in collectives:
        seconds = row.sent_bytes / rates.rate(row.axes)
        if _is_hidden(row, zero):
            hidden += seconds
        else:
            waited += seconds
    return waited + hidden, waited + max(0.0, hidden - beside)


def assumptions(
    target: Target,
    *,
    is_scheduled: bool,
    copies: bool = False,
    host: HostTraffic = NO_TRAFFIC,
) -> list[str]:
    """The assumptions of an estimate, for people.

    Args:
      target: the devices.
      is_scheduled: whether exposed communication was read from the compiled schedule.
      copies: whether a part of the state is in the host's memory.
      host: what the host does between the step's programs.
    """
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
        *(_of_host(hardware, is_scheduled=is_scheduled) if copies else ()),
        *(_of_host_work(hardware) if host.memory else ()),
        _SCHEDULED if is_scheduled else _UNSCHEDULED,
    ]


def _of_host(hardware: Hardware, *, is_scheduled: bool) -> list[str]:
    """What copies between the device and the host are taken to be."""
    if "host" not in hardware.sources or not is_scheduled:
        return ["copies between the device and its host are not part of the estimate."]
    return [
        f"a device copies to its host, and as much back at once, at "
        f"{hardware.host_achieved:.0%} of {hardware.host_rate / 1e9:.0f} GB/s "
        f"({hardware.sources['host']}); they are hidden and exposed as collectives are."
    ]


def _of_host_work(hardware: Hardware) -> list[str]:
    """What the host's update is taken to be."""
    if "host_work" not in hardware.sources:
        return ["the host's update between the programs is not part of the estimate."]
    return [
        "the host updates its part of the state between the programs, at "
        f"{hardware.host_memory_rate / 1e9:.0f} GB/s of its memory for each device and "
        f"{hardware.disk_rate / 1e9:.0f} GB/s of its disks if the state is there "
        f"({hardware.sources['host_work']}).",
    ]


_SCHEDULED = (
    "a collective overlaps with the kernels that the compiled schedule has between its "
    "start and its end, and with no other collective on the same kind of link; none "
    "has a latency."
)
_UNSCHEDULED = (
    "the program has no schedule that can be read, as GPUs' have, so a rule says what "
    "overlaps with matmuls: per-layer gathers and reductions over data (ZeRO 3; "
    "gradients of ZeRO 2) and the sends of a pipeline; no other collective."
)


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
