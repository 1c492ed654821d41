"""What is in the train state, where is it stored, and can training go on from it?"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.model.bridge import make_network
from jaxpar.sharding.zero import shard_leaves, zero_stage
from jaxpar.step.state import (
    TrainState,
    filled_in,
    make_init,
    require_sound,
    state_shardings,
)
from jaxpar.tree import named_leaves

X = np.ones((2, 3), np.float32)


def network_of(model: Any) -> Any:
    return make_network(model, lambda model, batch: model(batch), X)


def half_linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(3, 4, param_dtype=jnp.bfloat16, rngs=rngs)


def test_state_starts_with_fp32_masters_of_flaxs_parameters():
    """Within bf16's rounding, which XLA may leave out where it compiles both casts."""
    network, key = network_of(half_linear), jax.random.key(4)
    state = jax.jit(make_init(network, optax.adam(0.1).init))(key)
    init_key, run_key = jax.random.split(key)
    params, _ = network.init(init_key)
    for name, leaf in params.items():
        assert leaf.dtype == jnp.bfloat16
        assert state.params[name].dtype == jnp.float32
        right = leaf.astype(jnp.float32)
        np.testing.assert_allclose(state.params[name], right, rtol=2**-8)
    assert (int(state.step), state.key) == (0, run_key)
    moments = state.opt_state[0].mu
    np.testing.assert_array_equal(moments["kernel"], np.zeros((3, 4)))


def test_numbers_in_an_optimizers_state_become_arrays_of_a_strong_type():
    state = make_init(network_of(half_linear), lambda params: {"rate": 0.5, "n": 3})(
        jax.random.key(0)
    )
    rate, count = state.opt_state["rate"], state.opt_state["n"]
    assert (rate.dtype, count.dtype) == (jnp.float32, jnp.int32)
    assert not rate.weak_type
    assert not count.weak_type


def test_string_in_an_optimizers_state_raises():
    init = make_init(network_of(half_linear), lambda params: {"name": "mine"})
    message = (
        r"optimizer: leaf name of its state is str, but must be an array, a number or "
        r"a PRNG key\. Hold it outside of the state"
    )
    with pytest.raises(TypeError, match=message):
        init(jax.random.key(0))


def make_state(**change: Any) -> TrainState:
    right = TrainState(
        step=jnp.int32(0),
        params={"w": jnp.ones((64, 64)), "b": jnp.zeros(2)},
        frozen={},
        model_state={"mean": jnp.zeros(3)},
        opt_state=(),
        key=jax.random.key(0),
        carried={"loss_scale": {"scale": jnp.float32(1)}},
    )
    return dataclasses.replace(right, **change)


def test_moments_are_stored_beside_their_parameters():
    """By the end of their path and their shape; others as by the same rules."""
    mesh = make_mesh(MeshShape(data=4, tensor=2))
    moments = {
        "masked": {"mu": {"w": jnp.ones((64, 64)), "b": jnp.zeros(2)}},
        "rows": {"w": jnp.zeros(512)},
        "count": jnp.int32(0),
        "key": jax.random.key(1),
    }
    abstract = jax.eval_shape(lambda: make_state(opt_state=moments))
    compute = {"w": (None, "tensor"), "b": (None,)}
    zero = zero_stage(1)
    leaves = shard_leaves(abstract.params, compute, zero, mesh.shape)
    found = {
        name: place.spec
        for name, place in named_leaves(
            state_shardings(abstract, leaves, zero, mesh)
        ).items()
    }
    assert found["params/w"] == leaves["w"].stored_spec
    assert found["opt_state/masked/mu/w"] == leaves["w"].stored_spec
    assert found["opt_state/masked/mu/b"] == leaves["b"].stored_spec
    split = {axis for entry in found["opt_state/rows/w"] for axis in np.ravel(entry)}
    assert "data" in split
    assert len(found["opt_state/rows/w"]) == 1
    whole = ("opt_state/count", "opt_state/key", "model_state/mean", "key", "step")
    assert {found[name] for name in whole} <= {P(), P(None)}


def test_leaves_that_were_read_replace_our_own():
    own = make_state()
    structs = jax.eval_shape(make_state)
    read = dataclasses.replace(structs, params={**structs.params, "b": jnp.ones(2)})
    filled = filled_in(read, own)
    assert filled.params["b"] is read.params["b"]
    assert filled.params["w"] is own.params["w"]
    assert filled.step is own.step


def test_state_of_finite_parameters_is_sound_whatever_is_infinite_beside_them():
    require_sound(
        make_state(opt_state={"best": jnp.float32(jnp.inf), "n": jnp.int32(3)})
    )


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"params": {"w": jnp.array([1.0, jnp.inf])}}, "params/w"),
        ({"params": {"w": jnp.array([1.0, jnp.nan])}}, "params/w"),
        ({"opt_state": {"mu": jnp.array([jnp.nan])}}, "opt_state/mu"),
        (
            {"model_state": {name: jnp.float32(jnp.nan) for name in "abcdefg"}},
            r"(model_state/[a-e](, )?){5} and 2 more",
        ),
    ],
)
def test_state_that_is_not_finite_raises_with_the_leaves(change, names):
    message = rf"^the state is not finite: {names}\. Nothing was saved; go back to the"
    with pytest.raises(FloatingPointError, match=message):
        require_sound(make_state(**change))
