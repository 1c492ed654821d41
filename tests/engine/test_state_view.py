"""Is a leaf that was set noticed, and are a user's parameters placed as our own?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.engine.state_view import discard, make_view, placed_params
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.step.state import TrainState


def make_state() -> TrainState:
    params = {name: jnp.full(3, i) for i, name in enumerate("abcde")}
    return TrainState(
        step=jnp.int32(4),
        params=params,
        frozen={},
        model_state={},
        opt_state={"count": jnp.int32(4)},
        key=jax.random.key(0),
        carried={"loss_scale": jnp.float32(1.0)},
    )


def test_state_that_nobody_touched_is_unchanged():
    make_view(make_state()).require_unchanged()


def test_equal_array_is_another_one():
    state = make_state()
    view = make_view(state)
    state.params["b"] = state.params["b"] + 0
    message = (
        r"^engine\.state: params/b was set, but the state is a view: setting its "
        r"leaves has no effect on the engine\. Pass new parameters to engine\.lo"
    )
    with pytest.raises(ValueError, match=message):
        view.require_unchanged()


def test_leaf_that_was_added_or_removed_is_named():
    state = make_state()
    view = make_view(state)
    del state.opt_state["count"]
    state.model_state["mean"] = jnp.zeros(2)
    message = "^engine.state: opt_state/count, model_state/mean was set"
    with pytest.raises(ValueError, match=message):
        view.require_unchanged()


def test_three_leaves_are_named_and_the_others_counted():
    state = make_state()
    view = make_view(state)
    for name in state.params:
        state.params[name] = jnp.zeros(3)
    message = "^engine.state: params/a, params/b, params/c and 2 more was set"
    with pytest.raises(ValueError, match=message):
        view.require_unchanged()


@pytest.fixture(scope="module")
def structs():
    mesh = make_mesh(MeshShape(data=4, tensor=2))
    kernel = NamedSharding(mesh, P("data", "tensor"))
    return {
        "bias": jax.ShapeDtypeStruct(
            (6,), jnp.float32, sharding=NamedSharding(mesh, P())
        ),
        "kernel": jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=kernel),
    }


def given_params(dtype=np.float32):
    kernel = np.random.default_rng(0).normal(size=(4, 6))
    return {"kernel": kernel.astype(dtype), "bias": np.arange(6).astype(dtype)}


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (np.asarray, np.float64),
        (np.asarray, np.float32),
        (np.asarray, jnp.bfloat16),
        (jnp.asarray, np.float32),
        (jnp.asarray, jnp.bfloat16),
    ],
)
def test_params_get_the_engines_order_dtype_and_sharding(structs, make, dtype):
    given = jax.tree.map(make, given_params(dtype))
    placed = placed_params(given, structs, may_alias=None)
    assert list(placed) == ["bias", "kernel"]
    for name, struct in structs.items():
        leaf = placed[name]
        assert (leaf.dtype, leaf.sharding) == (jnp.float32, struct.sharding)
        right = given_params(dtype)[name].astype(np.float32)
        np.testing.assert_array_equal(leaf, right)


def test_params_of_a_flax_model_are_taken(structs):
    state = nnx.state(nnx.Linear(4, 6, rngs=nnx.Rngs(0)), nnx.Param)
    placed = placed_params(state, structs, may_alias=None)
    np.testing.assert_array_equal(placed["kernel"], state["kernel"][...])


def test_array_that_will_be_donated_is_not_the_users(structs):
    placed = placed_params(given_params(), structs, may_alias=None)
    again = placed_params(placed, structs, may_alias=False)
    discard(jax.tree.leaves(again))
    np.testing.assert_array_equal(placed["bias"], np.arange(6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"bias": None},
            r"missing \['bias'\] and unknown \[\] .* of 1 and 0\); pass a",
        ),
        (
            {"bais": np.ones(6), "w": np.ones(1), "x": np.ones(1), "y": np.ones(1)},
            r"missing \[\] and unknown \['bais', 'w', 'x'\] \(the first three of 0 and",
        ),
        (
            {"bias": np.ones(7)},
            r"bias is float\d\d\[7\], but must be floating of shape",
        ),
        ({"bias": np.ones(6, np.int32)}, r"bias is int32\[6\], but must be floating"),
    ],
)
def test_params_that_do_not_fit_raise(structs, change, message):
    given = given_params() | change
    given = {name: leaf for name, leaf in given.items() if leaf is not None}
    with pytest.raises(ValueError, match=f"^params: {message}"):
        placed_params(given, structs, may_alias=None)


def test_donated_array_that_numpy_saw_is_gone_on_every_device(structs):
    leaf = placed_params(given_params(), structs, may_alias=None)["kernel"]
    np.asarray(leaf)
    discard([leaf])
    assert leaf.is_deleted()
    discard([leaf])
