"""How is a search shown: the fastest choices, and why the others were excluded."""

import json
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from jaxpar.planner.choices import Choice
from jaxpar.planner.plan import Plan
from jaxpar.planner.search import TOP, Search, reasons, seconds_of


def show_search(search: Search, console: Console) -> None:
    """Print the ten fastest choices of a search, and why the others were excluded."""
    target, best = search.target, search.ranking
    number = len(search.rejected) + len(best)
    console.print(
        f"[bold]{target.name}[/]: {number:,} choices, {len(search.plans)} compiled, "
        f"{len(best)} of these fit"
    )
    if best:
        console.print(_ranking(best[:TOP], search))
    rejected = Table("why the others were excluded", box=box.SIMPLE)
    rejected.add_column("choices", justify="right")
    for why, count in reasons(search.rejected.values()):
        rejected.add_row(why, f"{count:,}")
    refused = [why for why in search.survey.facts.values() if isinstance(why, str)]
    for why in dict.fromkeys(refused):
        rejected.add_row(why, "")
    if rejected.row_count:
        console.print(rejected)


def _ranking(best: Sequence[tuple[Choice, Plan]], search: Search) -> Table:
    caption = "mesh: data x pipe x tensor; step in seconds, peak in GB of one device"
    table = Table(box=box.SIMPLE, caption=caption, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("", "mesh", "ZeRO", "accumulate", "schedule"):
        table.add_column(name, no_wrap=True)
    table.add_column("remat")
    for name in ("step", "tokens/s", "MFU", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, (choice, plan) in enumerate(best, 1):
        own, rate = plan.estimate, plan.tokens_per_second
        assert own is not None, "searches are of targets with rates"
        table.add_row(
            str(number),
            "x".join(map(str, choice.mesh)),
            str(choice.zero),
            str(choice.accumulate),
            choice.schedule or "-",
            choice.remat or "-",
            f"{own.step_seconds:.4g}",
            f"{rate:,.0f}" if rate else "-",
            f"{own.mfu:.1%}",
            f"{plan.memory.peak / 1e9:.1f}",
        )
    return table


def show_tried(
    tried: Sequence[tuple[Choice, Plan | str]], memory: int, console: Console
) -> None:
    """Print what was tried to make a plan fit, and the results."""
    table = Table("tried to make it fit", "", box=box.SIMPLE)
    table.add_column("GB", justify="right")
    table.add_column("step, s", justify="right")
    for choice, found in tried:
        if isinstance(found, str):
            table.add_row(str(choice), f"failed: {found[:200]}", "", "")
            continue
        said = "[green]fits[/]" if found.memory.peak <= memory else "[red]does not[/]"
        table.add_row(
            str(choice),
            said,
            f"{found.memory.peak / 1e9:.1f}",
            f"{seconds_of(found):.4g}",
        )
    console.print(table)


def as_json(search: Search) -> str:
    """A search as JSON: the ranking with every plan, and the excluded."""
    knobs = search.survey.knobs
    found = {
        "target": search.target.name,
        "compiled": len(search.plans),
        "ranking": [
            {"flags": list(choice.flags(knobs)), "plan": plan.as_dict()}
            for choice, plan in search.ranking
        ],
        "rejected": [
            {"flags": list(choice.flags(knobs)), "why": why}
            for choice, why in sorted(search.rejected.items())
        ],
        "refused": {
            " x ".join(map(str, mesh)): why
            for mesh, why in search.survey.facts.items()
            if isinstance(why, str)
        },
    }
    return json.dumps(found, indent=2)
