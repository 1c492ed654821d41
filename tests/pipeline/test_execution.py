"""Does the mesh choose how a model is run, and is what can't be cut refused?"""

from typing import Any

import pytest

from jaxpar.pipeline.block_cost import BlockWork
from jaxpar.pipeline.execution import OneStage, make_execution
from jaxpar.pipeline.gradients import Pipeline
from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.pipeline.schedules.interleaved import make_in_groups
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.zero import ZERO_STAGES, shard_leaves
from tests.model import toys, two_sections
from tests.model.toys import make_mesh
from tests.pipeline.parts import cut, make_network

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
    assert found.division == cut(4, 2, chunks)
    assert found.block == WORK


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "1f1c"}, r"schedule='1f1c' must be one of"),
        (
            {"pipe": 8},
            r"pipe=8 cuts a section into 8 parts, but the model has too few blocks "
            r"\(blocks: 4\); use at most pipe=4\.",
        ),
        (
            {"schedule": "interleaved:4"},
            r"pipe=2 x 4 chunks cuts a section into 8 parts, but the model has too few "
            r"blocks \(blocks: 4\); use at most pipe=1\.",
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


def two(**change):
    """The network of the two sections: four wide blocks, three narrow ones."""
    return two_sections.make_network(**change)


def test_uneven_blocks_are_refused_with_what_they_would_store():
    message = (
        r"mesh: pipe=4 can't divide the blocks evenly \(blocks: 5 blocks on 4 virtual "
        r"stages\): every stage would hold 1\.60 x the parameters of an even division, "
        r"more than 1\.25\. .* or pass PipelineModel\(allow_uneven=True\)"
    )
    with pytest.raises(ValueError, match=message):
        made(4, network=make_network(5, allow_uneven=False))
    assert made(4, network=make_network(5)).division == cut(5, 4, 1)


def test_blocks_up_to_the_limit_are_run_without_asking():
    """Eight on five stages have ten places, 1.25 x; on six virtual ones twelve."""
    network = make_network(8, allow_uneven=False)
    (own,) = made(5, network=network).division.sections
    assert own.num_virtual * own.places == 10
    with pytest.raises(
        ValueError, match=r"\(blocks: 8 blocks on 6 virtual stages\).* 1\.50 x"
    ):
        made(2, "interleaved:3", network=network)


def test_sections_are_weighed_by_their_parameters():
    """Of 72 and 42 parameters a block: 4 x 72 + 3 x 42 = 414 in an even division."""
    # The narrow blocks alone are 4/3: 4 x 72 + 4 x 42 = 456 are 1.10 x.
    for pipe in (2, 4):
        found = made(pipe, network=two())
        assert [own.num_chunks for own in found.division.sections] == [1, 1]
    # Wide ones: 6 x 72 + 3 x 42 = 558 are 1.35 x; what is even is not named.
    message = (
        r"pipe=3 can't divide the blocks evenly \(wide: 4 blocks on 3 virtual "
        r"stages\): every stage would hold 1\.35 x"
    )
    with pytest.raises(ValueError, match=message):
        made(3, network=two())


@pytest.mark.parametrize(
    ("schedule", "pipe", "chunks"),
    [("1f1b", 2, 2), ("gpipe", 4, 2), ("interleaved:2", 2, 3), ("interleaved:4", 4, 2)],
)
def test_every_section_has_chunks_of_its_own_in_the_schedule(schedule, pipe, chunks):
    """The narrow section of three blocks has one at most, however many are asked."""
    found = made(pipe, schedule, network=two(allow_uneven=True))
    assert found.schedule.name == schedule.split(":")[0]
    assert found.division.num_chunks == found.schedule.num_chunks == chunks
    assert (found.schedule.num_stages, found.schedule.num_microbatches) == (pipe, 4)


def test_own_table_for_the_sections_is_run_as_it_is():
    table = make_in_groups("own", 2, 4, 2)
    found = made(2, table, network=two())
    assert found.schedule is table
    assert found.division.num_chunks == 2


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            make_schedule("1f1b", 2, 4),
            r"schedule='1f1b': its num_chunks=1 must be a multiple of the model's 2 "
            r"sections, each of which has as many chunks on every stage",
        ),
        (
            make_in_groups("own", 2, 4, 3),
            r"schedule='own': its num_chunks=3 must be a multiple of the model's 2 sec",
        ),
        (
            # Two of each section, but the narrow one has blocks for one.
            make_in_groups("own", 2, 4, 4),
            r"schedule='own': it has num_chunks=4, but the model's sections have 3",
        ),
        (
            "zero_bubble",
            r"schedule='zero_bubble': it has num_chunks=1, but the model's sections "
            r"have 2 chunks on a stage; use '1f1b' or 'gpipe'",
        ),
    ],
)
def test_schedule_that_does_not_fit_two_sections_is_refused(schedule, message):
    with pytest.raises(ValueError, match=message):
        made(2, schedule, network=two(allow_uneven=True))


def test_sections_that_are_all_shorter_than_the_pipe_are_refused():
    """One that is not is enough: the others leave stages idle."""
    message = r"too few blocks \(wide: 4, narrow: 3\); use at most pipe=4\."
    with pytest.raises(ValueError, match=r"pipe=5 cuts a section into 5 .*" + message):
        made(5, network=two(allow_uneven=True))
    narrow = made(4, network=two(allow_uneven=True)).division.sections[1]
    assert narrow.counts.tolist() == [1, 1, 1, 0]


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


class Telling(toys.Embed):
    """Passes its tokens on beside what it makes of them."""

    def __call__(self, tokens, *, positions=None) -> Any:
        return {"x": super().__call__(tokens), "tokens": tokens}


class Passing(toys.Block):
    def __call__(self, hidden, *, positions=None) -> Any:
        return hidden | {"x": super().__call__(hidden["x"])}


class Reading(toys.Head):
    def __call__(self, hidden, *, temperature=None) -> Any:
        return super().__call__(hidden["x"])


def test_integers_between_stages_are_refused_with_another_way():
    model = toys.make_model({"embed": Telling, "block": Passing, "head": Reading})
    network = model.make_network(toys.loss_fn, toys.BATCHES[0])
    message = r"hidden state at blocks has int32 at 'tokens', but stages send floating"
    with pytest.raises(ValueError, match=message):
        make_execution(network, make_mesh(pipe=2), "1f1b", 4, WORK)
    assert make_execution(network, make_mesh(), "1f1b", 4, None).schedule is None
