"""Does every leaf rest in as many pieces as it can, and no large one whole unasked?"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding

from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.zero import (
    LARGE_BYTES,
    WHOLE_BELOW_BYTES,
    ZERO_STAGES,
    shard_leaves,
    zero_stage,
)

DIMS = (1, 2, 3, 4, 6, 8, 12, 64, 96)


def plan_of(
    shape,
    data,
    tensor,
    *,
    pipe=1,
    zero=3,
    ruled=None,
    dtype=jnp.float32,
    allow=(),
    regrouped=(),
):
    compute = tuple("tensor" if dim == ruled else None for dim in range(len(shape)))
    return shard_leaves(
        {"w": jax.ShapeDtypeStruct(shape, dtype)},
        {"w": compute},
        ZERO_STAGES[zero],
        {"data": data, "pipe": pipe, "tensor": tensor},
        allow,
        regrouped,
    )["w"]


def num_shards(plan, spec, shape) -> int:
    """Pieces of an array, as JAX counts them; raises where a dim does not divide."""
    mesh = AbstractMesh(tuple(plan.sizes.values()), tuple(plan.sizes))
    piece = NamedSharding(mesh, spec).shard_shape(shape)
    return math.prod(shape) // max(math.prod(piece), 1)


def most_shards(shape, data, pipe, tensor, ruled) -> int:
    """By brute force over the dims that each axis could split."""
    dims = [None, *range(len(shape))]
    best = 0
    for chosen in itertools.product(dims, repeat=3):
        if ruled is not None and chosen[2] != ruled:
            continue
        ways = [1] * len(shape)
        for dim, size in zip(chosen, (data, pipe, tensor), strict=True):
            if dim is not None:
                ways[dim] *= size
        if all(size % way == 0 for size, way in zip(shape, ways, strict=True)):
            best = max(best, math.prod(ways))
    return best


@st.composite
def layouts(draw):
    shape = tuple(draw(st.lists(st.sampled_from(DIMS), min_size=1, max_size=4)))
    data, tensor = draw(st.sampled_from((1, 2, 3, 4))), draw(st.sampled_from((1, 2, 4)))
    pipe = draw(st.sampled_from((1, 1, 2, 3)))
    ruled = draw(st.sampled_from([None, *range(len(shape))]))
    assume(ruled is None or shape[ruled] % tensor == 0)
    return shape, data, pipe, tensor, ruled


@given(layouts(), st.sampled_from((1, 2, 3)))
def test_sharded_leaf_rests_in_as_many_pieces_as_brute_force_finds(layout, zero):
    shape, data, pipe, tensor, ruled = layout
    plan = plan_of(shape, data, tensor, pipe=pipe, zero=zero, ruled=ruled, allow=("w",))
    found = num_shards(plan, plan.stored_spec, shape)
    if math.prod(shape) * 4 < WHOLE_BELOW_BYTES:
        assert found == (1 if ruled is None else tensor)
    else:
        assert found == most_shards(shape, data, pipe, tensor, ruled)


@given(layouts(), st.sampled_from((0, 1, 2, 3)))
def test_view_holds_the_same_pieces_as_the_leaf(layout, zero):
    shape, data, pipe, tensor, ruled = layout
    plan = plan_of(shape, data, tensor, pipe=pipe, zero=zero, ruled=ruled, allow=("w",))
    assert math.prod(plan.view_shape) == math.prod(shape)
    stored = num_shards(plan, plan.stored_spec, shape)
    assert num_shards(plan, plan.view_spec(), plan.view_shape) == stored
    over_data = num_shards(plan, plan.batch_spec, plan.view_shape)
    over_others = num_shards(plan, plan.view_spec(data=False), plan.view_shape)
    assert over_data * over_others == stored
    assert over_data in (1, data)
    if ruled is not None:
        assert plan.dim_of("tensor") == ruled
        assert num_shards(plan, plan.compute_spec, shape) == tensor


@given(layouts())
def test_slice_of_a_view_is_the_view_of_the_slice(layout):
    shape, data, pipe, tensor, ruled = layout
    plan = plan_of(shape, data, tensor, pipe=pipe, ruled=ruled, allow=("w",))
    piece = plan.without_leading_dim()
    if piece is None:
        placed = plan.dim_of("tensor"), plan.dim_of("pipe")
        assert 0 in (plan.data_dim, *placed, ruled)
        return
    leaf = np.arange(math.prod(shape)).reshape(shape)
    sliced = leaf.reshape(plan.view_shape)[-1]
    assert np.array_equal(sliced, leaf[-1].reshape(piece.view_shape))
    assert tuple(plan.view_spec())[1:] == tuple(piece.view_spec())
    assert plan.compute[1:] == piece.compute


@given(layouts())
def test_stage_0_keeps_all_but_ruled_dims_whole(layout):
    shape, data, pipe, tensor, ruled = layout
    plan = plan_of(shape, data, tensor, pipe=pipe, zero=0, ruled=ruled)
    assert plan.stored_spec == plan.compute_spec
    assert plan.why == "ZeRO stage 0 replicates over data"


def test_state_of_a_leaf_with_a_rule_still_rests_over_both_axes():
    plan = plan_of((64, 96), 4, 2, ruled=1)
    assert tuple(plan.stored_spec) == ("data", "tensor")
    assert plan.why == "rule: tensor splits dim 1; zero: data splits dim 0"


def test_leaf_of_one_dim_is_shared_by_both_axes():
    plan = plan_of((1024,), 4, 2)
    assert plan.shares_dim
    assert tuple(plan.stored_spec) == (("tensor", "data"),)
    assert plan.view_shape == (2, 512)
    assert tuple(plan.view_spec()) == ("tensor", "data")


@pytest.mark.parametrize("data", [2, 4])
def test_stack_of_layers_is_not_split_along_its_layers(data):
    plan = plan_of((4, 64, 64), data, 2)
    assert 0 not in (plan.data_dim, plan.dim_of("tensor"))
    assert plan.without_leading_dim() is not None


@given(layouts())
def test_leaf_to_be_regrouped_keeps_its_layers_and_pipe_a_dim_of_its_own(layout):
    shape, data, pipe, tensor, ruled = layout
    assume(ruled != 0)
    plan = plan_of(
        shape,
        data,
        tensor,
        pipe=pipe,
        ruled=ruled,
        allow=("w",),
        regrouped=("w",),
    )
    assert plan.data_dim != 0
    assert not plan.placed[0]
    dim = plan.dim_of("pipe")
    assert dim is None or (plan.placed[dim] == ("pipe",) and plan.data_dim != dim)


def test_all_three_axes_share_what_dims_there_are():
    plan = plan_of((1024,), 4, 2, pipe=2)
    assert tuple(plan.stored_spec) == (("pipe", "tensor", "data"),)
    assert plan.view_shape == (4, 256)
    assert tuple(plan.view_spec()) == (("pipe", "tensor"), "data")


def test_stack_is_split_along_its_layers_where_nothing_else_divides():
    plan = plan_of((4, 63, 63), 4, 1)
    assert plan.data_dim == 0
    assert plan.without_leading_dim() is None


@pytest.mark.parametrize(
    ("shape", "data", "tensor", "why"),
    [
        ((15, 15), 4, 1, r"replicated over data: 900 B is under 1024"),
        ((17, 17), 4, 2, r"replicated over tensor: 2 divides no dim; replicated over "
         r"data: 4 divides no dim"),
        ((64, 17), 4, 2, r"stored sharded over tensor on dim 0; zero: data splits "
         r"dim 0"),
        ((64, 64), 1, 1, r"one device on every axis"),
    ],
)  # fmt: skip
def test_reason_says_why_a_leaf_rests_as_it_does(shape, data, tensor, why):
    assert plan_of(shape, data, tensor).why == why


def test_bytes_count_not_elements_towards_whole():
    assert plan_of((400,), 4, 1, dtype=jnp.bfloat16).data_dim is None
    assert plan_of((400,), 4, 1, dtype=jnp.float32).data_dim == 0


def large_odd_shape() -> tuple[int, int]:
    side = math.isqrt(LARGE_BYTES // 4) | 1
    return side, side


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_large_leaf_that_cannot_be_sharded_raises(zero):
    message = (
        rf"zero={zero}: w \(shape \(513, 513\), 1\.0 MiB\) has no dim that data=4 "
        r"divides, so every device would hold all of it\. Pad a dim to a multiple of "
        r"4, change the mesh, or pass allow_whole=\('w',\)"
    )
    with pytest.raises(ValueError, match=message):
        plan_of(large_odd_shape(), 4, 2, zero=zero)


def test_large_leaf_may_stay_whole_where_nothing_is_gained_or_it_is_allowed():
    shape = large_odd_shape()
    assert plan_of(shape, 4, 2, allow=("w",)).data_dim is None
    assert plan_of(shape, 4, 2, zero=0).data_dim is None
    assert plan_of(shape, 1, 2).data_dim is None


def test_allow_whole_that_matches_nothing_names_the_near_one():
    message = r"allow_whole: 'v' matches no parameter; known paths: w\."
    with pytest.raises(ValueError, match=message):
        plan_of((8, 8), 4, 1, allow=("v",))


def test_allow_whole_as_one_string_raises():
    message = r"allow_whole='w' must be a tuple of path patterns; pass .*\('w',\)"
    with pytest.raises(ValueError, match=message):
        plan_of((8, 8), 4, 1, allow="w")


def test_stages_are_the_rows_of_the_table():
    assert [zero_stage(number) for number in range(4)] == list(ZERO_STAGES)
    assert [(s.stored, s.gather, s.reduce) for s in ZERO_STAGES] == [
        ("whole", "never", "step"),
        ("sharded", "step", "step"),
        ("sharded", "step", "microbatch"),
        ("sharded", "use", "microbatch"),
    ]


@pytest.mark.parametrize("number", [4, -1, True, 3.0, "3", None])
def test_unknown_stage_says_what_each_does(number, unchecked_types):
    message = rf"zero={number!r} must be 0 \(replicate\), 1 \(shard the state\), 2"
    with pytest.raises(ValueError, match=message):
        zero_stage(number)


def test_plan_of_a_whole_leaf_has_empty_specs():
    plan = LeafSharding(
        "w", (3,), (None,), None, ((),), {"data": 4, "pipe": 1, "tensor": 2}, ""
    )
    assert (plan.view_data_dim, plan.view_shape) == (None, (3,))
    assert tuple(plan.stored_spec) == tuple(plan.view_spec()) == (None,)
