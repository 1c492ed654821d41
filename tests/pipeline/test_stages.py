"""Are blocks put where their stage is, and their gradients back where they rest?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.pipeline.stages import Stages, divide
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.zero import ZERO_STAGES, shard_leaves

NAME = "blocks/w"
CUTS = [
    # blocks, stages, chunks
    (4, 1, 1),
    (8, 4, 1),
    (8, 2, 2),
    (12, 2, 3),
    (7, 3, 1),
    (5, 4, 1),
    (11, 2, 2),
    (13, 3, 4),
    (9, 2, 4),
    # Fewer blocks than virtual stages, in one place each.
    (1, 2, 1),
    (3, 4, 1),
    (3, 2, 2),
]
cuts = pytest.mark.parametrize(("L", "P", "v"), CUTS)


def blocks_of(L, P, v) -> list[list[int]]:
    """By virtual stage, its blocks: dealt out one by one, and counted."""
    counts = [0] * (P * v)
    for block in range(L):
        counts[block % (P * v)] += 1
    blocks = iter(range(L))
    return [[next(blocks) for _ in range(count)] for count in counts]


def staged_by_hand(stack, P, v):
    """The stack in the stages' order.

    A chunk's last block fills its idle place, the last of all an empty chunk's.
    """
    virtual = blocks_of(len(stack), P, v)
    places = max(map(len, virtual))
    order = []
    for stage in range(P):
        for chunk in range(v):
            own = virtual[chunk * P + stage]
            order += own + [(own or [-1])[-1]] * (places - len(own))
    return stack[order]


def plan_of(stages: Stages, data=2, rest=(6, 64)) -> LeafSharding:
    return shard_leaves(
        {NAME: jax.ShapeDtypeStruct((stages.num_blocks, *rest), jnp.float32)},
        {NAME: ("pipe" if stages.in_order else None, None, None)},
        ZERO_STAGES[3],
        {"data": data, "pipe": stages.num_stages, "tensor": 1},
        regrouped=() if stages.in_order else (NAME,),
    )[NAME]


def stack_of(plan: LeafSharding):
    return np.arange(np.prod(plan.shape), dtype=np.float32).reshape(plan.view_shape)


@cuts
def test_counts_deal_blocks_out_evenly_first_ones_first(L, P, v):
    stages, by_hand = Stages(L, P, v), blocks_of(L, P, v)
    assert stages.num_virtual == len(by_hand)
    assert stages.counts.tolist() == [len(own) for own in by_hand]
    firsts = [own[0] for own in by_hand if own]
    assert stages.firsts[: len(firsts)].tolist() == firsts
    assert stages.places == max(len(own) for own in by_hand)
    idle = sum(stages.places - len(own) for own in by_hand)
    assert stages.idle_places == idle
    assert stages.in_order == (idle == 0 and v == 1)


@cuts
def test_blocks_lie_in_the_stages_order(L, P, v):
    stages = Stages(L, P, v)
    plan = plan_of(stages)
    stack = stack_of(plan)
    staged = jax.jit(lambda x: stages.to_stages(plan, x))(stack)
    assert np.array_equal(staged, staged_by_hand(stack, P, v))


@cuts
def test_gradients_come_back_without_those_of_idle_places(L, P, v):
    stages = Stages(L, P, v)
    plan = plan_of(stages)
    stack = stack_of(plan)
    staged = staged_by_hand(stack, P, v)
    seen = np.zeros(L, int)
    for place, block in enumerate(staged_by_hand(np.arange(L), P, v)):
        seen[block] += 1
        if seen[block] > 1:
            staged[place] = np.nan
    assert np.isnan(staged).any() == (stages.idle_places > 0)
    stored = jax.jit(lambda x: stages.from_stages(plan, x))(staged)
    assert np.array_equal(stored, stack)


@cuts
def test_round_trip_gives_the_stack_back(L, P, v):
    stages = Stages(L, P, v)
    plan = plan_of(stages, data=1, rest=(2, 2))

    @jax.jit
    def round_trip(view):
        return stages.from_stages(plan, stages.to_stages(plan, view))

    assert np.array_equal(round_trip(stack_of(plan)), stack_of(plan))


def test_order_at_rest_moves_nothing():
    stages = Stages(8, 4, 1)
    plan = plan_of(stages)
    stack = jnp.asarray(stack_of(plan))
    assert stages.to_stages(plan, stack) is stages.from_stages(plan, stack) is stack
    assert stages.staged(plan) is plan


@pytest.mark.parametrize("data", [1, 2, 4])
@cuts
def test_staged_plan_lies_over_pipe_and_keeps_what_data_splits(L, P, v, data):
    stages = Stages(L, P, v)
    plan = plan_of(stages, data)
    staged = stages.staged(plan)
    assert staged.shape == (stages.num_virtual * stages.places, 6, 64)
    assert staged.compute == ("pipe", None, None)
    assert staged.data_dim == plan.data_dim
    if not stages.in_order:
        assert staged.placed[0] == ("pipe",)
        assert all("pipe" not in axes for axes in staged.placed[1:])
        view = jax.eval_shape(
            lambda x: stages.to_stages(plan, x),
            jax.ShapeDtypeStruct(plan.view_shape, jnp.float32),
        )
        assert len(staged.view_spec()) == len(view.shape) == len(staged.view_shape)


@cuts
def test_chunk_of_a_stage_is_its_virtual_stages_blocks(L, P, v):
    stages, virtual = Stages(L, P, v), blocks_of(L, P, v)
    staged = staged_by_hand(np.arange(L), P, v).reshape(P, -1)
    for stage in range(P):
        for chunk in range(v):
            own = stages.chunk_of({"w": jnp.asarray(staged[stage])}, jnp.int32(chunk))
            run = virtual[chunk * P + stage]
            assert own["w"][: len(run)].tolist() == run
            assert own["w"].shape == (stages.places,)


@cuts
def test_gradients_of_a_chunk_are_added_where_its_blocks_are(L, P, v):
    stages = Stages(L, P, v)
    n = stages.places
    grads = np.arange(3.0 * v * n, dtype=np.float32).reshape(v * n, 3)
    made = np.full((n, 3), 0.5, np.float32)
    for chunk in range(v):
        right = grads.copy()
        right[chunk * n : (chunk + 1) * n] += made
        found = stages.add_chunk(
            {"w": jnp.asarray(grads)}, {"w": jnp.asarray(made)}, jnp.int32(chunk)
        )
        assert np.array_equal(found["w"], right)


def test_no_chunk_adds_its_zeros_to_the_first():
    stages, idle = Stages(8, 2, 2), jnp.int32(-1)
    grads = {"w": jnp.arange(4.0)}
    assert stages.chunk_of(grads, idle)["w"].tolist() == [0.0, 1.0]
    same = stages.add_chunk(grads, {"w": jnp.zeros(2)}, idle)
    assert np.array_equal(same["w"], grads["w"])


def test_chunks_of_a_later_section_are_counted_from_its_first():
    stages = Stages(6, 1, 3, first_chunk=2)
    blocks = {"w": jnp.arange(6.0)}
    for chunk in range(3):
        own = stages.chunk_of(blocks, jnp.int32(2 + chunk))
        assert own["w"].tolist() == [2.0 * chunk, 2.0 * chunk + 1]
        added = stages.add_chunk(blocks, {"w": jnp.ones(2)}, jnp.int32(2 + chunk))
        assert np.flatnonzero(added["w"] - blocks["w"]).tolist() == own["w"].tolist()


@pytest.mark.parametrize(
    ("chunk", "nearest"), [(-1, 0), (0, 0), (1, 0), (5, 4), (8, 4)]
)
def test_chunk_of_another_section_reads_the_nearest_and_adds_its_zeros(chunk, nearest):
    stages = Stages(6, 1, 3, first_chunk=2)
    blocks = {"w": jnp.arange(6.0)}
    own = stages.chunk_of(blocks, jnp.int32(chunk))
    assert own["w"].tolist() == [nearest, nearest + 1]
    same = stages.add_chunk(blocks, {"w": jnp.zeros(2)}, jnp.int32(chunk))
    assert np.array_equal(same["w"], blocks["w"])


def test_sections_are_divided_one_after_the_other():
    division = divide({"encoder": 8, "decoder": 9}, 2, 2)
    encoder, decoder = division.sections
    assert encoder == Stages(8, 2, 2, "encoder", first_chunk=0)
    assert decoder == Stages(9, 2, 2, "decoder", first_chunk=2)
    assert (division.num_stages, division.num_chunks) == (2, 4)
    assert division.section_of_chunk.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("count", "chunks"), [(1, 1), (3, 1), (7, 1), (8, 2), (11, 2), (12, 3), (100, 3)]
)
def test_section_of_few_blocks_has_fewer_chunks(count, chunks):
    """Three where every one of four stages has a block for each; always one."""
    division = divide({"first": 12, "few": count, "last": 12}, 4, 3)
    assert [own.num_chunks for own in division.sections] == [3, chunks, 3]
    assert [own.first_chunk for own in division.sections] == [0, 3, 3 + chunks]
    assert division.num_chunks == 6 + chunks
    of_chunk = [0] * 3 + [1] * chunks + [2] * 3
    assert division.section_of_chunk.tolist() == of_chunk


@pytest.mark.parametrize(
    ("leaf", "section"),
    [
        ("encoder/attention/w", 0),
        ("decoder/w", 1),
        ("decoder", 1),
        ("between/w", None),
        ("embed/decoder/w", None),
        ("decoder_w", None),
        ("decode/w", None),
    ],
)
def test_leaf_is_stacked_in_the_section_that_its_path_begins_with(leaf, section):
    division = divide({"encoder": 2, "decoder": 4}, 2, 1)
    wanted = None if section is None else division.sections[section]
    assert division.of(leaf) is wanted
