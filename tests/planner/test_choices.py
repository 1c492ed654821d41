"""Are all choices listed that a target allows, and costed as the closed forms say?"""

import dataclasses

import pytest

from jaxpar.mesh import MeshShape
from jaxpar.planner.choices import (
    Choice,
    bubble_of,
    choices,
    live_rows,
    sent_over_data,
    sent_over_tensor,
    shapes,
)
from jaxpar.planner.targets import parse_target
from tests.planner.worlds import KNOBS, World


def test_meshes_are_all_products_with_tensor_inside_a_host():
    found = list(shapes(parse_target("h200:2x4"), KNOBS))
    assert len(found) == len(set(found)) == 9
    assert all(s.data * s.pipe * s.tensor == 8 for s in found)
    assert max(s.tensor for s in found) == 4
    without = [s.pipe for s in shapes(parse_target("h200:1x8"), {"mesh": MeshShape()})]
    assert without == [1, 1, 1, 1]


def test_choices_divide_the_batch_and_fill_their_pipeline():
    found = list(choices(World(rows=48).survey()))
    assert len(found) == len(set(found))
    for choice in found:
        data, pipe, _ = choice.mesh
        assert 48 % (data * choice.accumulate) == 0
        assert choice.accumulate >= pipe
        assert (choice.schedule is None) == (pipe == 1)
        if choice.schedule == "interleaved":
            assert choice.accumulate % pipe == 0
    assert {c.zero for c in found if c.mesh[1] == 1} == {0, 1, 2, 3}
    assert {c.zero for c in found if c.mesh[1] > 1} == {0, 1}
    assert {c.remat for c in found} == {"none", "dots", "full"}


def test_what_is_pinned_or_no_knob_is_not_varied():
    pinned = frozenset({"zero", "remat"})
    found = list(choices(World(pinned=pinned).survey()))
    assert {(c.zero, c.remat) for c in found} == {(1, "none")}
    knobs = {"mesh": MeshShape(), "zero": 3}
    found = list(choices(World(knobs=knobs).survey()))
    assert {(c.mesh[1], c.schedule, c.remat, c.accumulate) for c in found} == {
        (1, None, None, 1)
    }


def test_flags_are_the_recipes_own():
    choice = Choice((4, 2, 1), 1, 8, "zero_bubble", "full")
    said = "--mesh.data 4 --mesh.pipe 2 --mesh.tensor 1 --zero 1 --accumulate 8"
    assert (
        " ".join(choice.flags(KNOBS)) == f"{said} --schedule zero_bubble --remat full"
    )
    assert choice.flags({"mesh": None, "zero": 1}) == tuple(said.split()[:8])
    assert str(choice).startswith("data 4 x pipe 2 x tensor 1, ZeRO 1, accumulate 8")


@pytest.mark.parametrize(
    ("name", "shorter"), [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 3)]
)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 32), (8, 16)])
def test_bubble_is_the_schedules(name, shorter, stages, microbatches):
    """P - 1 idle micro-batches; half with two chunks, a third if backwards split."""
    idle = (stages - 1) / shorter
    choice = Choice((1, stages, 1), 1, microbatches, name)
    assert bubble_of(choice) == pytest.approx(idle / (microbatches + idle))


def test_bubble_of_split_backwards_needs_micro_batches_to_fill_it():
    third = 3 / (4 * 3 + 3)
    assert bubble_of(Choice((1, 4, 1), 1, 4, "zero_bubble")) > 1.4 * third


def test_no_bubble_without_a_pipeline():
    assert bubble_of(Choice((8, 1, 1), 1, 4)) == 0.0


def test_rows_under_way_are_one_models_worth_at_least():
    survey = World(rows=64).survey()
    assert live_rows(survey, Choice((8, 1, 1), 1, 4)) == 2
    assert live_rows(survey, Choice((2, 1, 4), 1, 4)) == 2
    assert live_rows(survey, Choice((2, 4, 1), 1, 16, "1f1b")) == 2 * 7 / 4


def test_volumes_over_data_are_2_2_2_and_3_psi():
    world = World()
    for zero, times, hides in (
        (0, 2, False),
        (1, 2, False),
        (2, 2, False),
        (3, 3, True),
    ):
        facts = world.facts(MeshShape(8), zero)
        sent, hidden = sent_over_data(facts, Choice((8, 1, 1), zero, 1))
        assert sent == pytest.approx(times * 2 * world.psi * 7 / 8)
        assert hidden == hides
    facts = world.facts(MeshShape(8), 3)
    assert sent_over_data(facts, Choice((8, 1, 1), 3, 4))[0] == pytest.approx(
        4 * 3 * 2 * world.psi * 7 / 8
    )
    facts = world.facts(MeshShape(4, 2), 1)
    piped = Choice((4, 2, 1), 1, 4, "1f1b")
    assert sent_over_data(facts, piped)[0] == pytest.approx(2 * world.psi * 3 / 4)


def test_volume_over_tensor_is_that_of_activations():
    survey = World().survey()
    facts = World().facts(MeshShape(4, 1, 2), 1)
    choice = Choice((4, 1, 2), 1, 4, remat="none")
    sent = sent_over_tensor(survey, facts, choice)
    assert sent == World().tokens / 4 * 300_000
    again = dataclasses.replace(choice, remat="full")
    assert sent_over_tensor(survey, facts, again) == 1.5 * sent
    alone = dataclasses.replace(choice, mesh=(8, 1, 1))
    assert sent_over_tensor(survey, facts, alone) == 0
