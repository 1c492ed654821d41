"""How is a trace of jax.profiler read: operations by device, and what the host did.

A CPU's operations are events of the host's threads, with the device's number; one that
returns before it is done has another event, "end: " and its name, when it is. A GPU has
a plane of its own with a line for each stream, and kernels carry the name of the
instruction that they are of (from the format's description; not tried on a GPU).
"""

import collections
import dataclasses
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxpar.compiled.timeline import Interval

_GPU = re.compile(r"^/device:GPU:\d+")
_HOST = "/host:CPU"
_STREAM = "Stream"
_END = "end: "
_LISTENER = "ThreadpoolListener"  # Half of a CPU's events.
_NANOSECOND = 1e-9


@dataclasses.dataclass(frozen=True)
class TracedOp:
    """One run of an operation on a device.

    Attributes:
      start: in seconds, on the trace's clock.
      end: likewise.
      op: the instruction's name in its program; on a GPU the kernel's where it has
        none, such as that of a copy.
      program: the name of the program; empty where the trace does not say.
    """

    start: float
    end: float
    op: str
    program: str


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a trace says.

    Attributes:
      devices: device -> its operations.
      host: name of an annotation -> when the host was in it.
      steps: number of a step -> when the host was in it.
    """

    devices: Mapping[str, Sequence[TracedOp]]
    host: Mapping[str, Sequence[Interval]]
    steps: Mapping[int, Interval]


def read_trace(data: Any, annotations: Iterable[str], step: str) -> Trace:
    """Read a trace.

    Args:
      data: the trace, a `jax.profiler.ProfileData`.
      annotations: names of the `jax.profiler.TraceAnnotation`s to look for.
      step: the name of the `jax.profiler.StepTraceAnnotation`.

    Returns:
      What it says; `devices` has those of this process whose operations it has.
    """
    devices: dict[str, list[TracedOp]] = collections.defaultdict(list)
    host: dict[str, list[Interval]] = {name: [] for name in annotations}
    steps: dict[int, Interval] = {}
    with warnings.catch_warnings():
        # "builtin type ... has no __module__ attribute", of jaxlib's iterators.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in data.planes:
            if _GPU.match(plane.name):
                devices[plane.name] += _on_gpu(plane)
            elif plane.name == _HOST:
                for number, op in _on_cpu(plane):
                    devices[f"cpu:{number}"].append(op)
                for event in _events(plane):
                    if event.name in host:
                        host[event.name].append(_interval(event))
                    elif event.name == step:
                        number = int(dict(event.stats)["step_num"])
                        steps[number] = _interval(event)
    return Trace(dict(devices), host, dict(sorted(steps.items())))


def _on_gpu(plane: Any) -> Iterator[TracedOp]:
    """The kernels and copies of a GPU."""
    for line in plane.lines:
        if line.name.startswith(_STREAM):
            for event in line.events:
                stats = dict(event.stats)
                op = stats.get("hlo_op", event.name)
                program = stats.get("hlo_module", "")
                yield TracedOp(*_interval(event), str(op), str(program))


def _on_cpu(plane: Any) -> Iterator[tuple[int, TracedOp]]:
    """The operations of XLA:CPU, each with its device's number."""
    begun, ended = [], {}
    for event in _events(plane):
        if event.name.startswith(_LISTENER):
            continue
        stats = dict(event.stats)
        if "hlo_op" in stats:
            begun.append((event, stats))
        elif event.name.startswith(_END) and "_c" in stats:
            ended[stats["_c"]] = _interval(event)[1]
    for event, stats in begun:
        start, end = _interval(event)
        end = max(end, ended.get(stats.get("_p"), end))
        program = str(stats.get("hlo_module", ""))
        found = TracedOp(start, end, str(stats["hlo_op"]), program)
        yield int(stats.get("device_ordinal", 0)), found


def _events(plane: Any) -> Iterator[Any]:
    for line in plane.lines:
        yield from line.events


def _interval(event: Any) -> Interval:
    start = event.start_ns * _NANOSECOND
    return start, start + event.duration_ns * _NANOSECOND
