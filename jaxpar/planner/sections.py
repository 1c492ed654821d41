"""What is said of a plan: the headings, findings and tables that all its views show."""

import dataclasses
import math

from jaxpar.compiled.exposed_table import HEAD, WORDS, finding, table_rows
from jaxpar.mesh import axes_text
from jaxpar.pipeline.schedules.chart import title
from jaxpar.pipeline.schedules.table import cost
from jaxpar.planner.plan import Plan
from jaxpar.planner.roofline import Estimate, assumptions
from jaxpar.planner.targets import parse_target

SCALES = {
    "B": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
}
"""Unit -> (scale, prefixed unit) of its numbers."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One piece of a stacked bar, in bytes or seconds.

    `derived` pieces are not the compiler's numbers; they are hatched.
    """

    name: str
    value: int | float
    colour: str
    derived: bool = False


@dataclasses.dataclass(frozen=True)
class Section:
    """One section on a plan.

    Attributes:
      name: "memory", "traffic", "exposed", "time" or "pipeline".
      heading: what it shows.
      finding: the number to take away.
      fits: whether the finding is good news; None for neither.
      head: the table's column names.
      rows: its cells; empty if there is no table.
      words: leading columns of text; the others are numbers.
      fractions: for each row, the length of its bar; empty if there are no bars.
    """

    name: str
    heading: str
    finding: str
    fits: bool | None = None
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    words: int = 1
    fractions: tuple[float, ...] = ()


def sections(plan: Plan, tokens: float | None = None) -> list[Section]:
    """The sections on a plan, in order; those that it has nothing for are left out.

    Args:
      plan: the plan.
      tokens: of the whole run, for its cost.
    """
    found = [_memory(plan), _traffic(plan), *_exposed(plan), _time(plan, tokens)]
    if plan.schedule is not None:
        bubble = cost(plan.schedule, **plan.schedule_times).bubble
        heading = f"Pipeline, {title(plan.schedule)}"
        found.append(Section("pipeline", heading, f"bubble {bubble:.1%}"))
    return found


def headline(plan: Plan) -> tuple[str, str]:
    """The plan's heading, in two lines."""
    plural = "s" * (plan.num_devices != 1)
    return (
        f"{plan.target}: {plan.num_devices:,} device{plural}",
        f"{axes_text(plan.mesh)}; ZeRO {plan.zero}; {plan.precision}; "
        f"{plan.num_params:,} parameters; compiled for {plan.compiled_for}",
    )


def notes(plan: Plan) -> list[str]:
    """The plan's notes, and the assumptions of its estimate."""
    if plan.estimate is None:
        return list(plan.notes)
    is_scheduled = plan.program.communication is not None
    target = parse_target(plan.target)
    copies = plan.memory.host_state > 0
    given = {"is_scheduled": is_scheduled, "copies": copies, "host": plan.host}
    found = assumptions(target, **given)
    return [*plan.notes, *found]


def verdict(plan: Plan) -> str:
    """Say whether the plan fits, and by how much."""
    peak, whole = plan.memory.peak, plan.device_memory_bytes
    on_host = plan.memory.host_state
    room = plan.host_memory_bytes
    on = quantity(on_host, "B") + (f" of {quantity(room, 'B')}" if room else "")
    beside = f"; {on} a device in host memory" if on_host else ""
    if plan.host.on_disk:
        beside += f"; {quantity(plan.host.on_disk, 'B')} a device on disk"
    if whole is None:
        return f"peak {quantity(peak, 'B')}; the device's memory is unknown{beside}"
    over, size = quantity(abs(peak - whole), "B"), quantity(whole, "B")
    if room and on_host > room:
        return f"does not fit{beside}"
    if peak > whole:
        return f"does not fit: {over} over {size}{beside}"
    return f"fits: {over} of {size} are free{beside}"


def memory_pieces(plan: Plan) -> list[Piece]:
    """A device's memory by kind; the sum is state, batch and temporaries."""
    memory = plan.memory
    other = memory.state - memory.parameters - memory.optimizer
    left = memory.activations
    return [
        Piece("parameters", memory.parameters, "#3b78b0"),
        Piece("optimizer state", memory.optimizer, "#86add2"),
        Piece("other state", other, "#59636e"),
        Piece("batch", memory.batch, "#a8b0b8"),
        Piece("compute copies", memory.copies, "#56b4e9", derived=True),
        Piece("gradients", memory.gradients, "#2cb48c", derived=True),
        Piece("activations and other temporaries", left, "#f0b429", derived=True),
    ]


def time_pieces(found: Estimate) -> list[Piece]:
    """A step's time by kind; the sum is the step."""
    return [
        Piece("matmuls", found.matmul_seconds, "#3b78b0"),
        Piece("other kernels", found.memory_seconds, "#86add2"),
        Piece("exposed communication", found.exposed_seconds, "#c9733b"),
        Piece("bubble", found.bubble_seconds, "#d3d8dd"),
        Piece("the host's update", found.host_seconds, "#8a6fb0"),
    ]


def quantity(number: int | float, unit: str) -> str:
    """Write bytes ("B") or seconds ("s") to three digits.

    Example:
      >>> quantity(80_812_000_000, "B"), quantity(33, "B"), quantity(0.0123, "s")
      ('80.8 GB', '33 B', '12.3 ms')
    """
    for scale, name in SCALES[unit]:
        if number >= 0.9995 * scale:
            rounded = float(f"{number / scale:.2e}")
            decimals = 0 if name == "B" else max(2 - math.floor(math.log10(rounded)), 0)
            return f"{number / scale:,.{decimals}f} {name}"
    return f"{number:.2g} {unit}"


def _memory(plan: Plan) -> Section:
    memory, whole = plan.memory, plan.device_memory_bytes
    sources = {False: "compiled", True: "derived"}
    found = [(p.name, sources[p.derived], p.value) for p in memory_pieces(plan)]
    found += [
        ("padding, of the state", "derived", memory.padding),
        ("temporaries, total", "compiled", memory.temporaries),
        ("peak", "compiled", memory.peak),
        ("device", "hardware", whole or 0),
    ]
    found = [row for row in found if row[2]]
    fractions = tuple(number / (whole or memory.peak) for *_, number in found)
    rows = [
        (name, source, quantity(number, "B"), f"{number:,}", f"{share:.1%}")
        for (name, source, number), share in zip(found, fractions, strict=True)
    ]
    return Section(
        "memory",
        "Memory of one device",
        verdict(plan),
        fits=plan.fits,
        head=("", "source", "size", "bytes", "share"),
        rows=tuple(rows),
        words=2,
        fractions=fractions,
    )


def _traffic(plan: Plan) -> Section:
    found = plan.program.collectives
    finding = quantity(sum(row.sent_bytes for row in found), "B")
    if plan.links is not None:
        inside = quantity(plan.links.inside_host, "B")
        between = quantity(plan.links.between_hosts, "B")
        finding += f": {inside} inside its host, {between} between hosts"
    rows = [
        (
            row.kind,
            " x ".join(row.axes) or "none",
            row.dtype,
            f"{row.count:,}",
            f"{row.group_size:,}",
            quantity(row.bytes, "B"),
            quantity(row.sent_bytes, "B"),
        )
        for row in found
    ]
    return Section(
        "traffic",
        "What one device sends in a step",
        finding if rows else "nothing: the program has no collective",
        head=("", "over", "dtype", "times", "group", "unsharded", "sent"),
        rows=tuple(rows),
        words=3,
    )


def _exposed(plan: Plan) -> list[Section]:
    """What kernels wait for, where the program's schedule says so."""
    found = plan.program.communication
    if found is None or not found.collectives:
        return []
    return [
        Section(
            "exposed",
            "Communication that kernels do not hide",
            finding(found),
            head=HEAD,
            rows=tuple(table_rows(found)),
            words=WORDS,
        )
    ]


def _time(plan: Plan, tokens: float | None) -> Section:
    own, again = plan.model_flops_per_step, plan.flops_per_step
    rows = [
        ("matmul FLOPs of the model", f"{own:.3g}"),
        ("with recomputation", f"{again:.3g}, {again / own - 1:.0%} more"),
        ("compiled in", f"{plan.compile_seconds:.1f} s"),
    ]
    found, rate = plan.estimate, plan.tokens_per_second
    finding = "no estimate: the rates of these devices are unknown"
    if found is not None:
        finding = f"{quantity(found.step_seconds, 's')}, MFU {found.mfu:.1%}"
        rows += [(p.name, quantity(p.value, "s")) for p in time_pieces(found)]
        rows.append(("collectives", quantity(found.links_seconds, "s")))
    if rate is not None:
        finding += f", {rate:,.0f} tokens/s"
    if tokens is not None and rate is not None:
        hours = f"{plan.device_hours(tokens):,.0f}"
        rows.append((f"device-hours of {tokens:.3g} tokens", hours))
    heading = "Time of a step, estimated"
    return Section("time", heading, finding, head=("of a step", ""), rows=tuple(rows))
