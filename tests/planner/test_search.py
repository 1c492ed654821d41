"""Does a search find what is the fastest in truth, with few compilations?"""

import dataclasses

import pytest

from jaxpar.planner.choices import Choice, choices
from jaxpar.planner.search import Search, reasons, run, start
from jaxpar.planner.subprocess import CompilerProcessError
from jaxpar.planner.targets import parse_target
from tests.planner.worlds import World

WORLDS = {
    "fits easily": World(rows=16),
    "little memory": World(psi=5e9, rows=32),
    "needs to be split": World(psi=13e9, rows=32),
    "two hosts": World(target="a100:2x8", psi=7e9, rows=32),
    "no pipeline": World(knobs={"mesh": None, "zero": 0, "accumulate": 1}),
}


def searched(world: World, make_plan=None, compiles=24, jobs=1) -> Search:
    search = start(world.survey(), parse_target(world.target))
    run(search, make_plan or world.plan, compiles=compiles, jobs=jobs)
    return search


def truth(world: World) -> float:
    """The least time of all choices that fit, by trying every one."""
    memory = parse_target(world.target).hardware.memory_bytes
    fit = [c for c in choices(world.survey()) if world.peak(c) <= memory]
    return min(map(world.seconds, fit))


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("jobs", [1, 3])
def test_best_is_within_two_percent_of_the_truth(name, jobs):
    world = WORLDS[name]
    search = searched(world, jobs=jobs)
    choice, plan = search.ranking[0]
    assert plan.fits
    assert world.seconds(choice) <= 1.02 * truth(world)
    assert len(search.plans) <= 24
    number = len(list(choices(world.survey())))
    assert len(search.rejected) + len(search.ranking) == number


def test_ranking_holds_what_fits_fastest_first():
    search = searched(WORLDS["little memory"])
    seconds = [plan.estimate.step_seconds for _, plan in search.ranking]
    assert seconds == sorted(seconds)
    assert all(plan.fits for _, plan in search.ranking)
    compiled = [c for c in search.plans if not search.plans[c].fits]
    assert all("compiled: takes" in search.rejected[c] for c in compiled)


def test_search_goes_on_past_choices_that_fail():
    world = WORLDS["fits easily"]
    best = searched(world).ranking[0][0]

    def make_plan(choice: Choice):
        if choice.mesh == best.mesh:
            raise CompilerProcessError("plan: the compiler crashed (SIGABRT).")
        if choice.zero == 2:
            raise ValueError("refused")
        return world.plan(choice)

    search = searched(world, make_plan)
    assert search.ranking
    assert all(c.mesh != best.mesh and c.zero != 2 for c, _ in search.ranking)
    assert "plan: the compiler crashed (SIGABRT)." in search.rejected.values()


def test_model_that_can_not_fit_has_no_ranking_and_compiles_nothing():
    search = searched(World(psi=200e9))
    assert search.ranking == []
    assert search.plans == {}
    whys = [why for why, _ in reasons(search.rejected.values())]
    assert whys == ["state, copies and gradients alone need more than the memory"]


def test_cpus_have_no_ranking():
    with pytest.raises(ValueError, match=r"'cpu:8': no rates of CPUs"):
        start(World().survey(), parse_target("cpu:8"))


def test_no_possible_mesh_is_said_with_its_reason():
    survey = World(rows=7).survey()
    refused = dict.fromkeys(survey.facts, "sample_batch: 7 rows.")
    with pytest.raises(ValueError, match=r"no mesh of its 8 devices .*: 7 rows\.$"):
        start(dataclasses.replace(survey, facts=refused), parse_target("h100:1x8"))
