"""Does a pipeline say and count what it does and costs, and shard its stacks over pipe?

That its gradients are one device's is for tests/equivalence/test_pipeline.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxpar.model.layer_drop import LayerDrop
from jaxpar.pipeline.block_cost import BlockWork
from jaxpar.pipeline.gradients import Pipeline
from jaxpar.pipeline.schedules.catalog import make_schedule, with_chunks
from jaxpar.pipeline.stages import divide
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.rules import axes_of
from jaxpar.sharding.zero import ZERO_STAGES
from tests.model import two_sections
from tests.model.toys import make_engine, make_mesh, make_model
from tests.pipeline.parts import cut, make_network

WORK = BlockWork(flops=1, deferred=0.5)


def explained(**change) -> str:
    engine = make_engine(
        make_model(num_blocks=change.pop("num_blocks", 4)),
        mesh=make_mesh(pipe=2),
        accumulate=4,
        **change,
    )
    explanation = engine.explain()
    return "\n".join((*explanation.closed_form, *explanation.notes))


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
            ["pipe: blocks: 5 blocks on 2 virtual stages leave 1 of 6 places idle"],
        ),
        (4, 2, ["blocks are moved to their stages, and back, once a step"]),
    ],
)
def test_notes_tell_idle_places_and_moved_blocks(blocks, chunks, wanted):
    schedule = make_schedule(f"interleaved:{chunks}", 2, 4)
    network = make_network(blocks)
    pipeline = Pipeline(network, schedule, cut(blocks, 2, chunks), WORK)
    text = "\n".join(pipeline.notes(ZERO_STAGES[1], {}))
    for part in wanted:
        assert part in text
    assert ("idle" in text) == (blocks == 5)
    assert "every stage computes all of both" in text


def test_notes_tell_that_ticks_stay_where_blocks_are_left_out():
    schedule, division = make_schedule("1f1b", 2, 4), cut(4, 2, 1)
    plain = make_network(4)
    dropping = dataclasses.replace(plain, layer_drop=LayerDrop())
    told = [
        "\n".join(Pipeline(own, schedule, division, WORK).notes(ZERO_STAGES[1], {}))
        for own in (plain, dropping)
    ]
    assert ["layer_drop saves a step less time" in text for text in told] == [0, 1]


def test_explanation_tells_what_a_split_backward_defers():
    """Of a dense layer's backward, half the products make gradients of weights."""
    told = explained(schedule="zero_bubble")
    assert "zero_bubble: 4 micro-batches on 2 stages take 6 ticks, 7.7% of" in told
    assert "50% of a backward computes only weight gradients, deferred" in told
    assert "the inputs of up to 2 of them" in told


def make_pipeline(name="1f1b", blocks=4, remat="full", work=WORK) -> Pipeline:
    """On two stages, four micro-batches."""
    schedule = make_schedule(name, 2, 4)
    division = cut(blocks, 2, schedule.num_chunks)
    return Pipeline(make_network(blocks, remat=remat), schedule, division, work)


@pytest.mark.parametrize(
    ("name", "bubble"),
    [
        # Of P = 2 stages, M = 4 micro-batches, v chunks: (P - 1) / (v M + P - 1).
        ("1f1b", 1 / 5),
        ("gpipe", 1 / 5),
        ("interleaved:2", 1 / 9),
    ],
)
def test_bubble_is_the_published_one(name, bubble):
    assert make_pipeline(name).bubble == pytest.approx(bubble)


@pytest.mark.parametrize(("name", "ticks"), [("1f1b", 6), ("interleaved:2", 12)])
def test_active_fraction_is_of_the_ticks(name, ticks):
    """v M of them have a forward on a stage."""
    chunks = 2 if ":" in name else 1
    assert make_pipeline(name).active_fraction == 4 * chunks / ticks


@pytest.mark.parametrize(
    ("name", "times"),
    [("1f1b", (1.0, 2.0, 0.0)), ("zero_bubble", (1.0, 1.0, 1.0))],
)
def test_times_are_those_of_the_blocks_cost(name, times):
    found = make_pipeline(name).times
    assert found == dict(zip(("forward", "backward", "weight"), times, strict=True))


@pytest.mark.parametrize(
    ("remat", "again"), [("none", 0), ("full", 4 * 4 * 3), ("dots", 4 * 4 * 3)]
)
def test_flops_add_every_block_that_is_run_again(remat, again):
    """On four micro-batches of three data shards; what was traced is not counted."""
    pipeline = make_pipeline(remat=remat, work=BlockWork(100, 0.5))
    assert pipeline.flops(10**9, 7000, 3) == 7000 + 100 * again


@pytest.mark.parametrize(
    ("blocks", "stored", "used"),
    [(4, ("pipe",), ("pipe",)), (5, (), ("pipe",))],
)
def test_stacks_are_sharded_over_pipe_where_their_order_is_the_stages(
    blocks, stored, used
):
    """Else they are stored by data alone, and over pipe in the stages' order."""
    pipeline = make_pipeline(blocks=blocks)
    shapes = {"blocks/w": (blocks, 6, 64), "head/w": (6, 64)}
    leaves = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }
    compute = {name: (None,) * len(shape) for name, shape in shapes.items()}
    sizes = {"data": 2, "pipe": 2, "tensor": 1}
    found = pipeline.shard_leaves(leaves, compute, ZERO_STAGES[1], sizes, ())
    assert axes_of(found["blocks/w"].compute[0]) == stored
    assert found["head/w"].compute == (None, None)
    staged, head = pipeline.communicated_shardings(list(found.values()))
    assert axes_of(staged.compute[0]) == used
    assert staged.shape == (-(-blocks // 2) * 2, 6, 64)
    assert head is found["head/w"]


def test_moved_vocabulary_is_not_said_to_be_computed_everywhere():
    leaves = {
        name: jax.ShapeDtypeStruct((16, 8), jnp.float32)
        for name in ("embed/table", "head/table")
    }
    compute = dict.fromkeys(leaves, (("tensor", "pipe"), None))
    sizes = {"data": 1, "pipe": 2, "tensor": 1}
    pipeline = make_pipeline()
    found = pipeline.shard_leaves(leaves, compute, ZERO_STAGES[1], sizes, ())
    told = "\n".join(pipeline.notes(ZERO_STAGES[1], found))
    assert "every stage computes all of both" not in told


def make_pipeline_of_two(blocks: dict[str, int]) -> Pipeline:
    """Of the wide and the narrow section, on two stages, four micro-batches."""
    network, division = two_sections.make_network(counts=blocks), divide(blocks, 2, 1)
    schedule = with_chunks("1f1b", 2, 4, division.num_chunks)
    return Pipeline(network, schedule, division, BlockWork(100, 0.5))


def test_notes_tell_the_idle_places_of_each_section():
    """An idle block of 6000 elements, in fp32, is half one for each of two devices."""
    pipeline = make_pipeline_of_two({"wide": 4, "narrow": 3})
    shapes = {"wide/w": (4, 60, 100), "narrow/w": (3, 60, 100), "narrowing/w": (8, 6)}
    leaves = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }
    compute = {name: (None,) * len(shape) for name, shape in shapes.items()}
    sizes = {"data": 1, "pipe": 2, "tensor": 1}
    found = pipeline.shard_leaves(leaves, compute, ZERO_STAGES[0], sizes, ())
    (told,) = [x for x in pipeline.notes(ZERO_STAGES[0], found) if "idle" in x]
    assert told.startswith(
        "pipe: narrow: 3 blocks on 2 virtual stages leave 1 of 4 places idle; their "
        "gradients take 12,000 bytes of a device, and their copies for the step 3,000 "
        "elements."
    )
    frozen = ["narrow/w", "narrowing/w"]
    (told,) = [x for x in pipeline.notes(ZERO_STAGES[0], found, frozen) if "idle" in x]
    assert (
        "gradients take 0 bytes of a device, and their copies for the step 3,000"
        in (told)
    )


def test_notes_tell_what_an_embedding_that_is_not_trained_saves():
    """The cotangent of the first hidden state."""
    pipeline, zero = make_pipeline(), ZERO_STAGES[1]
    leaf = LeafSharding("", (8, 8), (None, None), None, ((), ()), {}, "")
    leaves = dict.fromkeys(("embed/table", "head/table"), leaf)
    whole, saved = (
        "\n".join(pipeline.notes(zero, leaves, frozen))
        for frozen in (["head/table"], ["embed/table"])
    )
    assert "all-reduces its last and its first hidden state over pipe" in whole
    assert "all-reduces its last hidden state over pipe" in saved


def test_stacks_of_each_section_are_sharded_by_its_own_division():
    """Wide ones lie as they are used; narrow ones are moved, with an idle place."""
    pipeline = make_pipeline_of_two({"wide": 4, "narrow": 3})
    shapes = {"wide/w": (4, 6, 64), "narrow/w": (3, 6, 64), "narrowing/w": (6, 64)}
    leaves = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }
    compute = {name: (None,) * len(shape) for name, shape in shapes.items()}
    sizes = {"data": 2, "pipe": 2, "tensor": 1}
    found = pipeline.shard_leaves(leaves, compute, ZERO_STAGES[1], sizes, ())
    stored = {name: axes_of(leaf.compute[0]) for name, leaf in found.items()}
    assert stored == {"wide/w": ("pipe",), "narrow/w": (), "narrowing/w": ()}
    staged = pipeline.communicated_shardings(list(found.values()))
    wide, narrow, between = staged
    assert wide is found["wide/w"]
    assert between is found["narrowing/w"]
    assert axes_of(narrow.compute[0]) == ("pipe",)
    assert narrow.shape == (4, 6, 64)


def test_flops_and_ticks_of_two_sections_count_all_their_blocks():
    """Seven blocks a micro-batch, run again; two chunks of four forwards a stage."""
    pipeline = make_pipeline_of_two({"wide": 4, "narrow": 3})
    assert pipeline.flops(10**9, 7000, 3) == 7000 + 100 * 7 * 4 * 3
    assert pipeline.schedule.num_ticks == 2 * 4 + 2 * 2 + 2 - 2
    assert pipeline.active_fraction == 2 * 4 / pipeline.schedule.num_ticks
