"""How is a plan printed: tables in the terminal."""

import functools

from rich import box
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxpar.compiled.plain_text import as_plain_text
from jaxpar.pipeline.schedules.chart import chart
from jaxpar.planner.plan import Plan
from jaxpar.planner.sections import Section, headline, notes, sections

_MOODS = {None: "", True: "bold green", False: "bold red"}
"""Whether a finding is good news -> its style."""


def show_plan(plan: Plan, console: Console, *, tokens: float | None = None) -> None:
    """Print a plan.

    Args:
      plan: the plan.
      console: the console.
      tokens: of the whole run, to print its cost.
    """
    first, second = headline(plan)
    console.print(Text.assemble((first, "bold"), "; ", second))
    for section in sections(plan, tokens):
        finding = (section.finding, _MOODS[section.fits])
        console.print(Text.assemble("\n", (section.heading, "bold"), " — ", finding))
        if section.rows:
            console.print(_table(section))
    schedule = plan.schedule
    if schedule is not None:
        is_wide = schedule.num_ticks * len(f" {schedule.num_microbatches}")
        console.print(
            f"{schedule.num_ticks} ticks; --png and --html draw it"
            if is_wide > console.width
            else chart(schedule, console.width)
        )
    for line in notes(plan):
        console.print(Text(f"- {line}"))


def as_text(plan: Plan) -> str:
    """What `show_plan` prints, without colours, as wide as the terminal."""
    return as_plain_text(functools.partial(show_plan, plan))


def _table(section: Section) -> Table:
    """The section's table; exact bytes are left to the page, bars are added."""
    kept = [n for n, name in enumerate(section.head) if name != "bytes"]
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for n in kept:
        justify = "left" if n < section.words else "right"
        table.add_column(section.head[n], justify=justify, overflow="fold")
    if section.fractions:
        table.add_column("")
    for number, row in enumerate(section.rows):
        bars = [Bar(1.0, 0.0, each) for each in section.fractions[number : number + 1]]
        table.add_row(*(Text(row[n]) for n in kept), *bars)
    return table
