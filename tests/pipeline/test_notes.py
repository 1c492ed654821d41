"""Does an explanation say what a pipeline does and costs?"""

import pytest

from jaxpar.pipeline.block_cost import BlockWork
from jaxpar.pipeline.execution import OneStage, Pipeline
from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.pipeline.stages import Stages
from jaxpar.sharding.zero import ZERO_STAGES
from tests.model.toys import BATCHES, loss_fn, make_engine, make_mesh, make_model


def explained(**change) -> str:
    engine = make_engine(
        make_model(num_blocks=change.pop("num_blocks", 4)),
        mesh=make_mesh(pipe=2),
        accumulate=4,
        **change,
    )
    return "\n".join(engine.explain().closed_form)


def test_explanation_tells_schedule_bubble_and_what_is_kept():
    told = explained(schedule="1f1b", zero=3)
    assert "1f1b: 4 micro-batches on 2 stages take 6 ticks, 20.0% of" in told
    assert "a stage stores up to 3 inputs" in told
    assert "at ZeRO 3 a stage gathers its parameters" in told
    assert "every micro-batch, where the backward" not in told
    assert "idle" not in told


@pytest.mark.parametrize(
    ("blocks", "chunks", "wanted"),
    [
        (4, 1, []),
        (
            5,
            1,
            ["5 blocks on 2 virtual stages leave 1 of 6 places idle"],
        ),
        (4, 2, ["blocks are moved to their stages, and back, once a step"]),
    ],
)
def test_notes_tell_idle_places_and_moved_blocks(blocks, chunks, wanted):
    schedule = make_schedule(f"interleaved:{chunks}", 2, 4)
    network = make_model(num_blocks=blocks).make_network(loss_fn, BATCHES[0])
    pipeline = Pipeline(network, schedule, Stages(blocks, 2, chunks), BlockWork(1, 0.5))
    text = "\n".join(pipeline.notes(ZERO_STAGES[1], {}))
    for part in wanted:
        assert part in text
    assert ("idle" in text) == (blocks == 5)
    assert "every stage computes all of both" in text


def test_explanation_tells_what_a_split_backward_defers():
    """Of a dense layer's backward, half the products make gradients of weights."""
    told = explained(schedule="zero_bubble")
    assert "zero_bubble: 4 micro-batches on 2 stages take 6 ticks, 7.7% of" in told
    assert "50% of a backward computes only weight gradients, deferred" in told
    assert "the inputs of up to 2 of them" in told


def test_one_stage_says_nothing():
    assert OneStage().notes(ZERO_STAGES[3], {}) == ()
