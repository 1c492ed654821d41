"""How are choices for a recipe compared: one table, and the best compromise."""

import json

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxpar.mesh import axes_text
from jaxpar.planner.compare import Comparison
from jaxpar.planner.plan import Plan

_HEAD = ("state", "peak", "sent", "exposed", "step", "tokens/s")


def show_comparison(found: Comparison, console: Console) -> None:
    """Print a table of memory, traffic and time for each choice, and the best one."""
    caption = (
        "a device's memory and what it sends in GB; estimated milliseconds of a step, "
        "and of its communication that nothing hides"
    )
    table = Table(box=box.SIMPLE, caption=caption, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("choice", "mesh"):
        table.add_column(name)
    for name in _HEAD:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits")
    best = found.best()
    for choice, plan in found.found.items():
        is_best = best is not None and choice == best[0]
        name = Text(choice, style="bold green" if is_best else "")
        if isinstance(plan, str):
            said = plan.splitlines()[0] if plan else "failed"
            table.add_row(name, Text(said, style="red"), *[""] * (len(_HEAD) + 1))
            continue
        table.add_row(name, axes_text(plan.mesh), *_numbers(plan), _fits(plan))
    console.print(f"[bold]{found.target}[/]: {len(found.plans)} choices compiled")
    console.print(table)
    if best is None:
        console.print("none of them fits; jaxpar plan --search looks for one that does")
    else:
        console.print(
            Text.assemble(("the best compromise: ", "bold"), " — ".join(best))
        )


def as_json(found: Comparison) -> str:
    """A comparison as JSON: each choice's plan, or why it has none, and the best."""
    best = found.best()
    content = {
        "target": found.target,
        "choices": {
            name: {"why": plan} if isinstance(plan, str) else plan.as_dict()
            for name, plan in found.found.items()
        },
        "best": best and {"choice": best[0], "why": best[1]},
    }
    return json.dumps(content, indent=2)


def _numbers(plan: Plan) -> list[str]:
    sent = sum(row.sent_bytes for row in plan.program.collectives)
    own, rate = plan.estimate, plan.tokens_per_second
    return [
        f"{plan.memory.state / 1e9:.3g}",
        f"{plan.memory.peak / 1e9:.3g}",
        f"{sent / 1e9:.3g}",
        f"{own.exposed_seconds * 1e3:.3g}" if own else "-",
        f"{own.step_seconds * 1e3:.4g}" if own else "-",
        f"{rate:,.0f}" if rate else "-",
    ]


def _fits(plan: Plan) -> Text:
    styles = {None: ("-", ""), True: ("yes", "green"), False: ("no", "red")}
    text, style = styles[plan.fits]
    return Text(text, style=style)
