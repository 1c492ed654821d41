"""Does a search's table say what is fastest, and why the rest is excluded?"""

import dataclasses
import json

import pytest
from rich.console import Console

from jaxpar.planner.choices import Choice
from jaxpar.planner.search import Search, run, start
from jaxpar.planner.targets import parse_target
from jaxpar.show.search import as_json, show_search, show_tried
from tests.planner.handmade import GB, make_plan
from tests.planner.worlds import World


def searched(world: World, compiles=6) -> Search:
    search = start(world.survey(), parse_target(world.target))
    run(search, world.plan, compiles=compiles, jobs=1)
    return search


@pytest.fixture(scope="module")
def search() -> Search:
    return searched(World(psi=5e9, rows=32))


def shown(capsys, show, *args, width=80) -> str:
    show(*args, Console(width=width))
    return capsys.readouterr().out


def test_fastest_comes_first_with_its_numbers(search, capsys):
    said = shown(capsys, show_search, search)
    assert f"{len(search.plans)} compiled, {len(search.ranking)} of these fit" in said
    choice, plan = search.ranking[0]
    (row,) = [line for line in said.splitlines() if line.split()[:1] == ["1"]]
    assert row.split()[1:4] == [
        "x".join(map(str, choice.mesh)),
        str(choice.zero),
        str(choice.accumulate),
    ]
    numbers = (f"{plan.estimate.step_seconds:.4g}", f"{plan.memory.peak / 1e9:.1f}")
    assert set(numbers) <= set(row.split())
    assert max(map(len, said.splitlines())) <= 80


def test_every_reason_has_its_number(search, capsys):
    said = shown(capsys, show_search, search, width=200)
    _, excluded = said.split("why the others were excluded")
    ends = [
        line.split()[-1].replace(",", "")
        for line in excluded.split("\n")
        if line.split()
    ]
    found = sum(int(end) for end in ends if end.isdigit())
    assert found == len(search.rejected)


def test_search_without_a_choice_that_fits_has_no_ranking(capsys):
    said = shown(capsys, show_search, searched(World(psi=200e9)))
    assert "0 compiled, 0 of these fit" in said
    assert "mesh: data x pipe x tensor" not in said
    assert "state, copies and gradients alone need more than the memory" in said


def test_meshes_that_can_not_be_are_said_with_the_reason(search, capsys):
    facts = {(8, 1, 1): "sample_batch: 7 rows."}
    survey = dataclasses.replace(search.survey, facts=search.survey.facts | facts)
    other = dataclasses.replace(search, survey=survey)
    assert "sample_batch: 7 rows." in shown(capsys, show_search, other)
    refused = json.loads(as_json(other))["refused"]
    assert refused["8 x 1 x 1"] == "sample_batch: 7 rows."


def test_json_has_the_ranking_and_the_excluded(search):
    written = json.loads(as_json(search))
    best = search.ranking[0][0]
    assert written["target"] == search.target.name
    assert written["ranking"][0]["flags"] == list(best.flags(search.survey.knobs))
    assert written["ranking"][0]["plan"]["fits"] is True
    assert len(written["rejected"]) == len(search.rejected)
    assert all(row["why"] for row in written["rejected"])


def test_tried_choices_say_whether_they_fit_or_failed(capsys):
    first, second, third = (Choice((8, 1, 1), zero, 1, None, None) for zero in range(3))
    tried = [
        (first, make_plan()),
        (second, "the compiler crashed"),
        (third, make_plan()),
    ]
    lines = shown(capsys, show_tried, tried[:2], 80 * GB, width=120).splitlines()
    (row,) = [line for line in lines if "75.0" in line]
    assert "fits" in row
    assert "5" in row.split()
    assert any("failed: the compiler crashed" in line for line in lines)
    over = shown(capsys, show_tried, tried[2:], 60 * GB, width=120)
    assert "does not" in over
