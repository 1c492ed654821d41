"""Does the table say what each choice costs, and which one is the best?"""

import json

from rich.console import Console

from jaxpar.planner.compare import Comparison
from jaxpar.show.compare import as_json, show_comparison
from tests.planner.handmade import GB, make_cpu_plan, make_plan

FOUND = Comparison(
    "h200:8x8",
    {
        "zero=3": make_plan(),
        "zero=0": make_plan(device_memory_bytes=60 * GB),
        "zero=1 mesh.pipe=2": "ValueError: pipe=2 has no schedule\nmore",
    },
)


def shown(found: Comparison) -> str:
    console = Console(width=140, force_terminal=False)
    with console.capture() as capture:
        show_comparison(found, console)
    return capture.get()


def test_each_choice_has_a_row_and_the_best_a_reason() -> None:
    lines = [line.strip() for line in shown(FOUND).splitlines() if line.strip()]
    (row,) = [line for line in lines if line.startswith("zero=3")]
    numbers = ["42", "75", "38.4", "200", "5000", "200,000", "yes"]
    assert row.split()[-7:] == numbers
    assert [line.split()[-1] for line in lines if line.startswith("zero=0")] == ["no"]
    assert any("pipe=2 has no schedule" in line for line in lines)
    assert lines[-1].startswith("the best compromise: zero=3 — of those that fit it is")


def test_nothing_that_fits_is_said() -> None:
    text = shown(Comparison("h200:8x8", {"zero=0": FOUND.plans["zero=0"]}))
    assert "none of them fits" in text
    assert "-" in shown(Comparison("cpu:8", {"zero=0": make_cpu_plan()}))


def test_json_has_plans_and_reasons() -> None:
    found = json.loads(as_json(FOUND))
    assert found["best"]["choice"] == "zero=3"
    assert found["choices"]["zero=0"]["fits"] is False
    assert found["choices"]["zero=1 mesh.pipe=2"]["why"].startswith("ValueError")
