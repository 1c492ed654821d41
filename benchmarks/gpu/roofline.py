"""Where does a step's time go, and how far is each kind of kernel from its roofline?

A trace of a few steps gives each kernel's time; the compiled program gives the bytes
and FLOPs of the instruction that it is of. A roofline is the larger of bytes over the
memory's rate and FLOPs over the matmuls' rate, both as fast as they are known to get.
"""

import collections
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions

from benchmarks.gpu.session import Rows, Session
from benchmarks.gpu.workloads import Workload
from jaxpar.compiled.categories import ATTENTION, category_of
from jaxpar.compiled.hardware import Hardware, hardware_of, load_hardware
from jaxpar.compiled.hlo import Module, parse, runs_of
from jaxpar.compiled.kernel_time import matmul_flops
from jaxpar.compiled.memory_traffic import moved_bytes
from jaxpar.compiled.trace import TracedOp, read_trace

LONGEST = 30
STEPS, WARM = 3, 3
UNKNOWN = "of no instruction"
"""The category of kernels whose instruction the trace does not name."""
_CONTROL = ("while", "conditional", "call")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An instruction of the program that is a kernel, in all its runs in a step.

    Attributes:
      category: what it is for.
      bytes: read and written.
      flops: of its matmuls.
    """

    category: str
    bytes: int
    flops: float

    def seconds(self, hardware: Hardware) -> float:
        """By its roofline."""
        return max(
            self.bytes / (hardware.memory_rate * hardware.memory_achieved),
            self.flops / (hardware.peak["bfloat16"] * hardware.peak_achieved),
        )


def time_by_kernel(session: Session, workload: Workload) -> Rows:
    """Trace steps; a row by category, and the longest kernels.

    All kernels are kept as a file beside the program.
    """
    text = workload.engine.lower().compile().as_text() or ""
    module = parse(text)
    (session.keep / "kernels.hlo.txt").write_text(text, encoding="utf-8")
    known = kernels_of(module, workload.vocabulary)
    ops = [op for op in traced(workload) if not _is_control(op.op, module)]
    times = seconds_by_op(ops)
    hardware = hardware_here(session)
    assert hardware is not None, "an item's GPU has a file of rates"
    rows = [row(op, *own, known, hardware) for op, own in times.items()]
    rows.sort(key=lambda each: -each["ms"])
    kept = json.dumps(rows, indent=1)
    (session.keep / "kernels.json").write_text(kept, encoding="utf-8")
    yield "by category", by_category(times, known, workload, hardware)
    yield "longest kernels", {"kernels": rows[:LONGEST]}


def hardware_here(session: Session) -> Hardware | None:
    """The rates of this device; in the dry run an H200's."""
    found = hardware_of(jax.devices()[0].device_kind)
    return load_hardware("h200") if found is None and session.dry else found


def traced(workload: Workload) -> list[TracedOp]:
    """The operations of the first device in a few steps."""
    for number in range(WARM):
        float(workload.step(number))
    options = ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        with contextlib.ExitStack() as stack:
            stack.callback(jax.profiler.stop_trace)
            losses = [workload.step(WARM + number) for number in range(STEPS)]
            jax.block_until_ready(losses)
            workload.engine.wait()
        (path,) = Path(folder).rglob("*.xplane.pb")
        trace = read_trace(ProfileData.from_file(str(path)), (), "")
    return list(next(iter(trace.devices.values()), []))


def seconds_by_op(ops: Iterable[TracedOp]) -> dict[str, tuple[float, float]]:
    """Instruction or kernel -> seconds and launches, of one step."""
    seconds: dict[str, float] = collections.defaultdict(float)
    launches: collections.Counter[str] = collections.Counter()
    for op in ops:
        seconds[op.op] += (op.end - op.start) / STEPS
        launches[op.op] += 1
    return {op: (seconds[op], launches[op] / STEPS) for op in seconds}


def row(
    op: str,
    seconds: float,
    launches: float,
    known: Mapping[str, Kernel],
    hardware: Hardware,
) -> dict[str, Any]:
    """What is known of a kernel."""
    found = {"op": op, "ms": 1e3 * seconds, "launches": launches}
    kernel = known.get(op)
    if kernel is None:
        return {**found, "category": UNKNOWN}
    roofline = kernel.seconds(hardware)
    return {
        **found,
        "category": kernel.category,
        "gb": kernel.bytes / 1e9,
        "gflops": kernel.flops / 1e9,
        "roofline_ms": 1e3 * roofline,
    }


def by_category(
    times: Mapping[str, tuple[float, float]],
    known: Mapping[str, Kernel],
    workload: Workload,
    hardware: Hardware,
) -> dict[str, Any]:
    """Category -> milliseconds of a step, its roofline's, and their ratio.

    The FLOPs of attention's calls are the workload's, for the program does not say
    them. A roofline is that of the category's kernels in the program.
    """
    measured: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for op, (seconds, launches) in times.items():
        kernel = known.get(op)
        sums = measured[kernel.category if kernel else UNKNOWN]
        sums[0] += seconds
        sums[1] += launches
    rooflines: dict[str, float] = collections.defaultdict(float)
    for kernel in known.values():
        rooflines[kernel.category] += kernel.seconds(hardware)
    if ATTENTION in rooflines:
        matmuls = hardware.peak["bfloat16"] * hardware.peak_achieved
        least = workload.attention_flops / matmuls
        rooflines[ATTENTION] = max(rooflines[ATTENTION], least)
    found: dict[str, Any] = {
        "roofline_is": (
            f"bytes at {hardware.memory_achieved * hardware.memory_rate / 1e12:.2f} "
            f"TB/s, FLOPs at "
            f"{hardware.peak_achieved * hardware.peak['bfloat16'] / 1e12:.0f} TFLOP/s"
        )
    }
    for category, (seconds, launches) in sorted(
        measured.items(), key=lambda each: -each[1][0]
    ):
        own = {"ms": 1e3 * seconds, "launches": launches}
        if rooflines.get(category):
            own["roofline_ms"] = 1e3 * rooflines[category]
            own["of_roofline"] = seconds / rooflines[category]
        found[category] = own
    return found


def kernels_of(module: Module, vocabulary: int) -> dict[str, Kernel]:
    """The program's kernels by the names of their instructions."""
    runs, _ = runs_of(module)
    around = {
        instruction.name: computation
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
    }
    found = {}
    for instruction, moved in moved_bytes(module):
        own = around[instruction.name]
        category = category_of(instruction, own, module, vocabulary)
        flops = runs[own.name] * sum(matmul_flops(instruction, own, module).values())
        found[instruction.name] = Kernel(category, moved, flops)
    return found


def _is_control(op: str, module: Module) -> bool:
    """Whether an operation is a loop, whose kernels are traced too."""
    return any(
        op in computation.instructions
        and computation.instructions[op].opcode in _CONTROL
        for computation in module.computations.values()
    )
