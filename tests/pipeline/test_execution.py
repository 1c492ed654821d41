"""Does the mesh choose how a model is run, and is what can't be cut refused?"""

import pytest

from jaxpar.pipeline.block_cost import BlockWork
from jaxpar.pipeline.execution import OneStage, make_execution
from jaxpar.pipeline.gradients import Pipeline
from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.sharding.zero import ZERO_STAGES, LeafSharding, shard_leaves
from tests.model.toys import make_mesh
from tests.pipeline.parts import make_network

WORK = BlockWork(flops=100, deferred=0.5)


def made(pipe, schedule="1f1b", *, num_blocks=4, block=WORK, network=None):
    network = network or make_network(num_blocks)
    return make_execution(network, make_mesh(pipe=pipe), schedule, 4, block)


def test_mesh_with_one_stage_runs_the_loss_as_it_is():
    assert isinstance(made(1, block=None), OneStage)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved:2", 2), ("gpipe", 1)]
)
def test_mesh_with_stages_runs_the_schedule_of_that_name(schedule, chunks):
    found = made(2, schedule)
    assert isinstance(found, Pipeline)
    assert found.schedule.name == schedule.split(":")[0]
    stages = found.stages
    assert (stages.num_blocks, stages.num_stages, stages.num_chunks) == (4, 2, chunks)
    assert found.block == WORK


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "1f1c"}, r"schedule='1f1c' must be one of"),
        ({"pipe": 8}, r"pipe=8 cuts the model into 8 parts.*use at most pipe=4\."),
        (
            {"schedule": "interleaved:4"},
            r"pipe=2 x 4 chunks cuts the model into 8 parts.*use at most pipe=1\.",
        ),
        (
            {"schedule": "zero_bubble", "block": BlockWork(100, 0.0)},
            r"schedule='zero_bubble': only 0% of the block's backward",
        ),
        ({"network": make_network().embed}, r"pipe=2 needs a model that can be cut"),
    ],
)
def test_what_can_not_be_run_in_stages_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        made(**({"pipe": 2} | change))


def test_own_table_is_run_even_if_its_split_gains_nothing():
    table = make_schedule("zero_bubble", 2, 4)
    assert made(2, table, block=BlockWork(100, 0.0)).schedule is table


def test_wrong_schedule_is_refused_on_one_stage_too():
    with pytest.raises(ValueError, match="schedule='1f1c' must be one of"):
        made(1, "1f1c")


def test_one_stage_says_nothing():
    assert OneStage().notes(ZERO_STAGES[3], {}) == ()


def test_one_stage_counts_and_gathers_what_is_there():
    one = OneStage()
    assert one.flops(7, model=5, shards=2) == 7
    assert (one.bubble, one.active_fraction, one.schedule) == (0.0, 1.0, None)
    leaf = LeafSharding.__new__(LeafSharding)
    assert one.communicated_shardings((leaf,)) == [leaf]
    assert one.shard_leaves is shard_leaves
