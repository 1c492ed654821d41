"""What will a run cost on a target: the compiled step and an estimate of its time."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxpar.compiled.program import CompiledProgram
from jaxpar.jaxprs.evaluate import ATTENTION_KERNEL, PLACEHOLDER
from jaxpar.mesh import axes_text
from jaxpar.pipeline.schedules.table import Schedule
from jaxpar.planner.roofline import Estimate
from jaxpar.planner.targets import Target
from jaxpar.planner.work import Links
from jaxpar.step.update import NO_TRAFFIC, HostTraffic

_OWN_FORM = frozenset(
    ("memory", "program", "estimate", "schedule", "schedule_times", "links", "host")
)
"""Fields of `Plan` that `Plan.as_dict` writes in a different form."""


@dataclasses.dataclass(frozen=True)
class BytesPerDevice:
    """Memory of one device by kind.

    State, arguments, temporaries and peak are the compiler's. The split of the
    temporaries is derived: gradients and copies by closed forms, activations as the
    remainder.

    Attributes:
      state: what is stored between steps in the device's memory, padding included.
      padding: part of the state: bytes that the compiler adds to fill tiles (TPUs).
      parameters: of the state, the fp32 masters.
      optimizer: of the state, the optimizer's.
      batch: the batch.
      temporaries: memory that is only alive within the step.
      copies: part of the temporaries, derived: parameters in the compute dtype.
      gradients: part of the temporaries, derived: as they are summed or reduced.
      activations: part of the temporaries, derived: the remainder.
      peak: peak memory.
      host_state: what is stored between steps in the host's memory, for this device.
    """

    state: int
    padding: int
    parameters: int
    optimizer: int
    batch: int
    temporaries: int
    copies: int
    gradients: int
    activations: int
    peak: int
    host_state: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """What a step costs on a target; ``print`` shows what ``jaxpar plan`` prints.

    Attributes:
      target: the target's name.
      compiled_for: the platform that the step was compiled for.
      num_devices: devices.
      mesh: axis -> devices.
      zero: the ZeRO stage.
      precision: the compute dtype.
      num_params: parameters.
      memory: bytes of one device by kind.
      device_memory_bytes: of the device; None where it is unknown (CPUs).
      program: the compiled step, read.
      links: bytes that a device sends, by the slowest link of each collective; None
        where it is unknown (CPUs).
      flops_per_step: matmul FLOPs of all devices, with recomputation.
      model_flops_per_step: three times those of the forward pass.
      tokens_per_step: tokens of a step; None where the recipe does not say.
      compile_seconds: lowering and compiling.
      estimate: of the step time; None where rates are unknown.
      schedule: the pipeline's; None without one.
      schedule_times: the time of each kind of its work, in forwards of a stage.
      notes: other facts to know.
      host_memory_bytes: of the host, for each of its devices; None where it is unknown.
      host: what the host does between a step's programs.
    """

    target: str
    compiled_for: str
    num_devices: int
    mesh: Mapping[str, int]
    zero: int
    precision: str
    num_params: int
    memory: BytesPerDevice
    device_memory_bytes: int | None
    program: CompiledProgram
    links: Links | None
    flops_per_step: int
    model_flops_per_step: int
    tokens_per_step: int | None
    compile_seconds: float
    estimate: Estimate | None
    schedule: Schedule | None
    schedule_times: Mapping[str, float]
    notes: tuple[str, ...]
    host_memory_bytes: int | None = None
    host: HostTraffic = NO_TRAFFIC

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits the device's memory, and the rest the host's; None if
        the device's is unknown."""
        if self.device_memory_bytes is None:
            return None
        room = self.host_memory_bytes
        is_held = room is None or self.memory.host_state <= room
        return is_held and self.memory.peak <= self.device_memory_bytes

    @property
    def tokens_per_second(self) -> float | None:
        """From the estimate."""
        if self.estimate is None or self.tokens_per_step is None:
            return None
        return self.tokens_per_step / self.estimate.step_seconds

    def device_hours(self, tokens: float) -> float | None:
        """Device-hours of a run over so many tokens."""
        rate = self.tokens_per_second
        return None if rate is None else tokens / rate * self.num_devices / 3600

    def __repr__(self) -> str:
        fits = {None: "", True: ", fits", False: ", does not fit"}[self.fits]
        return (
            f"<Plan: {self.target}, {axes_text(self.mesh)}, ZeRO {self.zero}, "
            f"{self.num_params:,} parameters, peak {self.memory.peak:,} bytes{fits}>"
        )

    def __str__(self) -> str:
        from jaxpar.planner.plan_text import as_text  # noqa: PLC0415 - needs Plan

        return as_text(self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """The text that a notebook shows."""
        return {"text/plain": str(self)}

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON's types; its keys are stable between versions."""
        found = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _OWN_FORM
        }
        estimated = self.estimate and {
            **dataclasses.asdict(self.estimate),
            "tokens_per_second": self.tokens_per_second,
        }
        return {
            **found,
            "mesh": dict(self.mesh),
            "schedule": self.schedule and self.schedule.name,
            "links": self.links and dataclasses.asdict(self.links),
            "host": dataclasses.asdict(self.host),
            "notes": list(self.notes),
            "fits": self.fits,
            "bytes_per_device": dataclasses.asdict(self.memory),
            "collectives": [
                {
                    "op": row.kind,
                    "axis": " x ".join(row.axes),
                    "dtype": row.dtype,
                    "count": row.count,
                    "bytes": row.bytes,
                    "sent_bytes": row.sent_bytes,
                }
                for row in self.program.collectives
            ],
            "collective_bytes_per_device": sum(
                row.bytes for row in self.program.collectives
            ),
            "exposed": self._exposed(),
            "estimate": estimated,
        }

    def _exposed(self) -> list[dict[str, Any]] | None:
        """A row for each kind of collective; None where no schedule can be read."""
        found = self.program.communication
        if found is None:
            return None
        return [
            {
                "op": row.kind,
                "axis": " x ".join(row.axes),
                "count": row.count,
                "sync": row.num_sync,
                "sent_bytes": row.sent_bytes,
                "wire_seconds": row.wire_seconds,
                "exposed_seconds": row.exposed_seconds,
            }
            for row in found.by_kind
        ]

    def as_json(self) -> str:
        """`as_dict` as text."""
        return json.dumps(self.as_dict(), indent=2)


def split_memory(
    program: CompiledProgram, state: Mapping[str, int], *, copies: int, gradients: int
) -> BytesPerDevice:
    """Split a compiled step's memory by kind.

    Args:
      program: the step; its arguments are ``state[i]`` and ``batch...``.
      state: the state's leaves, in order -> bytes of a shard, without padding.
      copies: bytes of the parameters in the compute dtype, by closed form.
      gradients: bytes of the sums of gradients, likewise.

    Returns:
      The bytes.
    """
    by_kind, plain = {"params": 0, "opt_state": 0}, 0
    arguments = {f"state[{number}]": name for number, name in enumerate(state)}
    for argument, name in arguments.items():
        if argument in program.on_host:
            continue
        plain += state[name]
        kind = name.split("/")[0]
        if kind in by_kind:
            by_kind[kind] += program.parameters.get(argument, 0)
    left = program.memory.temporaries
    copies = min(copies, left)
    gradients = min(gradients, left - copies)
    return BytesPerDevice(
        state=program.bytes_of("state"),
        padding=program.bytes_of("state") - plain,
        parameters=by_kind["params"],
        optimizer=by_kind["opt_state"],
        batch=program.bytes_of("batch"),
        temporaries=left,
        copies=copies,
        gradients=gradients,
        activations=left - copies - gradients,
        peak=program.memory.peak,
        host_state=sum(
            number
            for name, number in program.parameters.items()
            if name in arguments and name in program.on_host
        ),
    )


def backend_notes(target: Target, text: str) -> list[str]:
    """The limits of the compiler that was used.

    Args:
      target: the devices.
      text: the compiled program.
    """
    if target.hardware is None:
        return [
            "XLA:CPU makes all-reduces where GPUs make reduce-scatters, and fuses less "
            "than GPUs do: its temporaries and traffic are larger."
        ]
    if not target.has_compiler:
        return [
            f"no compiler for {target.hardware.name} is installed, so this is "
            "XLA:CPU's program: reduce-scatters are all-reduces, temporaries are "
            f"larger, and padding is missing. {target.remedy} for the real one.",
        ]
    if target.hardware.platform != "cuda":
        return ["TPUs pad arrays to tiles: the state's bytes include the padding."]
    if f"{PLACEHOLDER}.attention" in text:
        return [
            "attention is a call with the bytes and FLOPs of cuDNN's, which only a "
            "GPU can compile; blocks of scores above the diagonal are skipped."
        ]
    if ATTENTION_KERNEL in text:
        return [
            "kernels replace XLA's attention; their FLOPs, counted in full tiles, are "
            "among the matmul FLOPs."
        ]
    return [
        "attention is XLA's own, which reads and writes the scores: cuDNN's needs bf16 "
        "or fp16, and supports no mask but the causal one."
    ]
