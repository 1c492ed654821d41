"""Which choice is the best compromise, and which are refused?"""

import dataclasses
from pathlib import Path

import pytest

from jaxpar.planner.compare import USUAL, Comparison, compare_recipe, read_choices
from jaxpar.planner.plan import Plan
from tests.planner.handmade import ESTIMATE, GB, MEMORY, make_cpu_plan, make_plan


def plan(seconds: float, gigabytes: float, device: int = 150) -> Plan:
    return make_plan(
        memory=dataclasses.replace(MEMORY, peak=int(gigabytes * GB)),
        device_memory_bytes=device * GB,
        estimate=dataclasses.replace(ESTIMATE, step_seconds=seconds),
    )


def best(**plans: Plan | str) -> tuple[str, str] | None:
    return Comparison("h200:8x8", plans).best()


def test_of_those_that_are_about_as_fast_the_smallest_is_best() -> None:
    found = best(a=plan(1.0, 100), b=plan(1.04, 40), c=plan(1.3, 10))
    assert found == (
        "b",
        "2 that fit take about as long (within 5 %), and of them it needs the least "
        "memory, 40 GB; the fastest, a, needs 60 GB more; c needs 30 GB less, for 25% "
        "more time",
    )


def test_what_does_not_fit_is_never_best() -> None:
    found = best(a=plan(1.0, 200), b=plan(2.0, 40), c="refused: no such mesh")
    assert found == ("b", "of those that fit it is the fastest by more than 5 %")
    assert best(a=plan(1.0, 200), b="refused") is None


def test_without_rates_the_smallest_is_best() -> None:
    small = dataclasses.replace(MEMORY, peak=GB)
    found = best(a=make_cpu_plan(), b=make_cpu_plan(memory=small), c=make_cpu_plan())
    assert found is not None
    assert found[0] == "a", "7.5 MB are less than 1 GB"
    assert "no rates are known" in found[1]


def test_choices_are_fields_and_values() -> None:
    assert read_choices("usual") == list(USUAL)
    text = " zero=1 ;zero=3   mesh.tensor=2;"
    assert read_choices(text) == ["zero=1", "zero=3 mesh.tensor=2"]
    for wrong, message in {
        "zero=1": "must have two different choices",
        "zero=1; zero=1": "must have two different choices",
        "zero=1; --zero 3": "'--zero' must be a field, an equals sign",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_choices(wrong)


@pytest.mark.thorough
def test_a_recipe_is_compiled_for_each_choice() -> None:
    """What it can't be has its reason, and the others their plans."""
    choices = ["zero=0", "zero=3 mesh.tensor=2", "zero=3 mesh.tensor=3", "stage=1"]
    told: list[str] = []
    found = compare_recipe(
        Path("recipes/pretrain.py"),
        "cpu:8",
        choices,
        ("--model", "tiny"),
        report=lambda choice, plan: told.append(choice),
    )
    assert told == choices
    assert list(found.plans) == choices[:2]
    state = [plan.memory.state for plan in found.plans.values()]
    assert 7 < state[0] / state[1] < 9
    assert "multiple of 3 devices" in str(found.found[choices[2]])
    assert found.found["stage=1"] == "Unrecognized options: --stage, 1"
    chosen = found.best()
    assert chosen is not None
    assert chosen[0] == choices[1]
