"""Does the search find a choice as fast as people's own, by its own estimate?

1.3B on eight H100s and 70B on 64 H200s: the search's best against twelve choices picked
by hand, each compiled. Needs the compilers (`.ci/setup --compilers yes`); no GPU.

    python benchmarks/plan_search.py
    python benchmarks/plan_search.py --cases 1.3b --compiles 8
"""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.planner.choices import KNOBS, Choice
from jaxpar.planner.plan import Plan
from jaxpar.planner.recipe import plan_in_subprocess
from jaxpar.planner.recipe_search import search_recipe
from jaxpar.planner.search import seconds_of
from jaxpar.planner.subprocess import CompilerProcessError
from jaxpar.show.search import show_search

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "pretrain.py"
SETS: dict[str, Any] = dict.fromkeys(KNOBS)
CASES: dict[str, tuple[str, int, tuple[Choice, ...]]] = {
    "1.3b": (
        "h100:1x8",
        64,
        (
            Choice((8, 1, 1), 0, 1, None, "none"),
            Choice((8, 1, 1), 1, 1, None, "none"),
            Choice((8, 1, 1), 1, 2, None, "dots"),
            Choice((8, 1, 1), 2, 1, None, "dots"),
            Choice((8, 1, 1), 3, 1, None, "none"),
            Choice((8, 1, 1), 3, 1, None, "full"),
            Choice((4, 1, 2), 1, 1, None, "none"),
            Choice((4, 1, 2), 3, 2, None, "full"),
            Choice((2, 1, 4), 1, 1, None, "dots"),
            Choice((1, 1, 8), 1, 4, None, "full"),
            Choice((4, 2, 1), 1, 8, "1f1b", "none"),
            Choice((2, 2, 2), 1, 8, "1f1b", "full"),
        ),
    ),
    "70b": (
        "h200:8x8",
        256,
        (
            Choice((64, 1, 1), 3, 1, None, "full"),
            Choice((64, 1, 1), 3, 2, None, "full"),
            Choice((64, 1, 1), 3, 4, None, "dots"),
            Choice((32, 1, 2), 3, 2, None, "full"),
            Choice((16, 1, 4), 3, 1, None, "full"),
            Choice((8, 1, 8), 1, 8, None, "full"),
            Choice((8, 1, 8), 3, 4, None, "full"),
            Choice((8, 8, 1), 1, 32, "1f1b", "full"),
            Choice((4, 2, 8), 1, 16, "1f1b", "full"),
            Choice((2, 4, 8), 1, 32, "1f1b", "full"),
            Choice((2, 4, 8), 1, 32, "interleaved", "full"),
            Choice((1, 8, 8), 1, 64, "1f1b", "full"),
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What is searched."""

    cases: tuple[str, ...] = ()
    """1.3b, 70b; both, and the result is written, if none is named."""
    compiles: int = 16
    """Steps that each search compiles at most."""


def measure(name: str, compiles: int, console: Console) -> dict[str, Any]:
    """Search, then plan what people would pick."""
    target, rows, picked = CASES[name]
    flags = ("--model", name, "--precision", "bf16", "--batch-size", str(rows))
    began = time.perf_counter()

    def report(choice: Choice, found: Plan | str) -> None:
        console.print(f"{choice}: {_said(found)}", highlight=False)

    search = search_recipe(RECIPE, target, flags, compiles=compiles, report=report)
    seconds = time.perf_counter() - began
    show_search(search, console)
    best, plan = search.ranking[0]
    hand: dict[str, float | str | None] = {}
    for choice in picked:
        found = search.plans.get(choice) or _planned(choice, target, flags)
        report(choice, found)
        hand[str(choice)] = found if isinstance(found, str) else _seconds(found)
    times = [each for each in hand.values() if isinstance(each, float)]
    ratio = min(times) / seconds_of(plan)
    console.print(f"{name} on {target}: {best}: {seconds_of(plan):.4g} s a step")
    console.print(f"the best picked by hand takes {ratio:.3f} of it")
    return {
        "target": target,
        "search_seconds": seconds,
        "compiled": len(search.plans),
        "best": str(best),
        "step_seconds": seconds_of(plan),
        "picked_by_hand": hand,
        "best_by_hand_over_best": ratio,
    }


def _planned(choice: Choice, target: str, flags: tuple[str, ...]) -> Plan | str:
    try:
        return plan_in_subprocess(RECIPE, target, (*flags, *choice.flags(SETS)))
    except (ValueError, CompilerProcessError) as error:
        return str(error)


def _seconds(plan: Plan) -> float | None:
    """Of a step; None where the plan does not fit."""
    return seconds_of(plan) if plan.fits else None


def _said(found: Plan | str) -> str:
    if isinstance(found, str):
        return f"failed: {found[:200]}"
    said = f"{seconds_of(found):.4g} s, {found.memory.peak / 1e9:.1f} GB"
    return said if found.fits else f"{said}, does not fit"


def main(config: Config) -> None:
    """Measure, print, write."""
    console = Console()
    found = {
        name: measure(name, config.compiles, console)
        for name in config.cases or tuple(CASES)
    }
    if not config.cases:
        console.print(write_result("plan_search", found))


if __name__ == "__main__":
    main(parse(Config, __doc__))
