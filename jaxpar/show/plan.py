"""How is a plan printed: tables in the terminal."""

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from jaxpar.pipeline.schedules.table import Schedule
from jaxpar.planner.plan import Plan
from jaxpar.planner.roofline import assumptions
from jaxpar.planner.targets import parse_target
from jaxpar.show.panels import memory_pieces, verdict
from jaxpar.show.schedule import chart

_MOOD = {None: "bold", True: "bold green", False: "bold red"}
"""Whether it fits -> the style of that text."""


def show_plan(plan: Plan, console: Console, *, tokens: float | None = None) -> None:
    """Print a plan.

    Args:
      plan: the plan.
      console: the console.
      tokens: of the whole run, to print its cost.
    """
    shape = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    console.print(
        f"[bold]{plan.target}[/]: {plan.num_devices:,} devices, {shape}, ZeRO "
        f"{plan.zero}, {plan.precision}; {plan.num_params:,} parameters"
    )
    console.print(_memory(plan))
    console.print(verdict(plan), style=_MOOD[plan.fits], highlight=False)
    console.print(_traffic(plan))
    if plan.links is not None:
        console.print(
            f"a device sends {plan.links.inside_host / 1e9:.3f} GB inside its host, "
            f"{plan.links.between_hosts / 1e9:.3f} GB in groups that span hosts"
        )
    console.print(_time(plan, tokens))
    if plan.schedule is not None:
        console.print(_schedule(plan.schedule, console.width))
    for line in (*plan.notes, *assumptions(parse_target(plan.target))):
        console.print(f"- {line}", highlight=False)


def _memory(plan: Plan) -> Table:
    table = Table("memory of one device", box=box.SIMPLE)
    table.add_column("GB", justify="right")
    table.add_column("")
    whole = plan.device_memory_bytes or plan.memory.peak
    rows = [
        (piece.name + " (derived)" * piece.derived, piece.value)
        for piece in memory_pieces(plan)
        if piece.value
    ]
    if plan.memory.padding:
        rows.append(("of the state, padding to tiles", plan.memory.padding))
    for name, number in rows:
        table.add_row(name, f"{number / 1e9:.2f}", _bar(number / whole))
    table.add_section()
    peak = plan.memory.peak
    table.add_row("peak", f"{peak / 1e9:.2f}", _bar(peak / whole))
    return table


def _schedule(schedule: Schedule, width: int) -> RenderableType:
    """The chart, if it fits."""
    if schedule.num_ticks * len(f" {schedule.num_microbatches}") > width:
        return f"{schedule.name}: {schedule.num_ticks} ticks; --png and --html draw it"
    return Group(f"{schedule.name}:", chart(schedule, width))


def _bar(fraction: float, width: int = 40) -> str:
    filled = min(width, round(width * fraction))
    return "█" * filled + ("+" if fraction > 1 else "")


def _traffic(plan: Plan) -> Table:
    table = Table("communication per step", "over", "dtype", box=box.SIMPLE)
    for column in ("times", "GB", "GB sent by a device"):
        table.add_column(column, justify="right")
    for row in plan.program.collectives:
        table.add_row(
            row.kind,
            " x ".join(row.axes) or "none",
            row.dtype,
            f"{row.count:,}",
            f"{row.bytes / 1e9:.3f}",
            f"{row.sent_bytes / 1e9:.3f}",
        )
    if not plan.program.collectives:
        table.add_row("nothing", *[""] * 5)
    return table


def _time(plan: Plan, tokens: float | None) -> RenderableType:
    table = Table("a step", "", box=box.SIMPLE, show_header=True)
    again = plan.flops_per_step / plan.model_flops_per_step - 1
    table.add_row(
        "matmuls",
        f"{plan.model_flops_per_step:.3g} FLOPs, plus {again:.0%} recomputed",
    )
    table.add_row("compiled in", f"{plan.compile_seconds:.1f} s")
    found = plan.estimate
    if found is not None:
        table.add_row("matmuls", f"{found.products_seconds:.3f} s")
        table.add_row("other kernels", f"{found.memory_seconds:.3f} s")
        table.add_row(
            "collectives",
            f"{found.links_seconds:.3f} s, {found.exposed_seconds:.3f} s exposed",
        )
        table.add_row("bubble", f"{found.bubble_seconds:.3f} s ({found.bubble:.1%})")
        table.add_section()
        table.add_row("estimate", f"{found.step_seconds:.3f} s, MFU {found.mfu:.1%}")
    if plan.tokens_per_second is not None:
        table.add_row("tokens per second", f"{plan.tokens_per_second:,.0f}")
    if tokens is not None and plan.tokens_per_second is not None:
        hours = plan.device_hours(tokens)
        table.add_row(f"{tokens:.3g} tokens", f"{hours:,.0f} device-hours")
    return table
