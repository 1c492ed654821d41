"""Is the state stored where its ZeRO stage says, and made there from the run's seed?"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.engine import placement as placing
from jaxpar.engine.placement import Placement
from jaxpar.optim import fused_adamw
from jaxpar.tree import named_leaves

BATCH = {"x": np.ones((8, 256), np.float32)}
KERNEL = 256 * 64
ADAMW, FUSED = optax.adamw(1e-3), fused_adamw(1e-3)


@functools.cache
def make_engine(zero: int = 1, optimizer: Any = ADAMW, **change) -> jaxpar.Engine:
    given = {
        "model": lambda rngs: nnx.Linear(256, 64, rngs=rngs),
        "loss_fn": lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        "optimizer": optimizer,
        "sample_batch": BATCH,
        "mesh": jaxpar.MeshShape(data=4, tensor=2),
        "zero": zero,
    }
    return jaxpar.initialize(**(given | change))


def elements_on_a_device(structs) -> dict[str, int]:
    return {
        name: math.prod(leaf.sharding.shard_shape(leaf.shape))
        for name, leaf in named_leaves(structs).items()
    }


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_device_stores_its_share_of_parameters_and_moments(zero):
    """An eighth of them from stage 1 on; scalars are on every device."""
    placement = make_engine(zero).placement
    held = elements_on_a_device(placement.structs())
    ways = 1 if zero == 0 else 8
    assert held["params/kernel"] == KERNEL // ways
    assert held["opt_state/0/mu/kernel"] == held["opt_state/0/nu/kernel"]
    assert held["opt_state/0/nu/kernel"] == KERNEL // ways
    assert held["step"] == held["opt_state/0/count"] == 1


def test_shapes_and_dtypes_are_those_of_the_abstract_state():
    placement = make_engine(3).placement
    given, own = (
        {name: (x.shape, x.dtype) for name, x in named_leaves(state).items()}
        for state in (placement.abstract, placement.structs())
    )
    assert given == own


def test_initial_parameters_of_equal_layers_are_those_of_jitted_flax_to_the_bit():
    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(256, 256, rngs=rngs) for _ in range(6)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    engine = make_engine(3, model=Deep, seed=7)
    placement = engine.placement
    key = jax.random.split(jax.random.key(7))[0]
    places = jax.tree.leaves(placement.shardings.params)
    right = jax.jit(
        lambda key: jax.tree.leaves(nnx.split(Deep(nnx.Rngs(key)), nnx.Param)[1]),
        out_shardings=places,
    )(key)
    for leaf, own in zip(jax.tree.leaves(engine.state.params), right, strict=True):
        np.testing.assert_array_equal(leaf, own)


@pytest.mark.parametrize("optimizer", [ADAMW, FUSED], ids=["optax", "fused"])
def test_initial_state_is_that_of_flax_and_optax_from_the_seed(optimizer):
    engine = make_engine(1, optimizer, seed=5, precision="bf16")
    init_key, run_key = jax.random.split(jax.random.key(5))
    params, _ = engine._network.init(init_key)
    state = engine.state
    for name, leaf in params.items():
        # Compiled, a normal draw differs by rounding.
        np.testing.assert_allclose(state.params[name], leaf, rtol=1e-6, atol=1e-7)
    right = named_leaves(jax.jit(ADAMW.init)(params))
    for name, leaf in named_leaves(state.opt_state).items():
        np.testing.assert_array_equal(leaf, right[name])
    assert state.key == run_key
    packed = engine.placement.packed
    for leaf, own in zip(engine._leaves, jax.tree.leaves(packed), strict=True):
        assert leaf.sharding.is_equivalent_to(own.sharding, leaf.ndim)


@pytest.mark.parametrize("optimizer", [ADAMW, FUSED], ids=["optax", "fused"])
def test_packed_state_is_as_described_and_unpacks_to_the_same_bits(optimizer):
    engine = make_engine(1, optimizer, seed=5, precision="bf16")
    placement, state = engine.placement, engine.state
    packed = placement.pack(state)
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), packed
    )
    described = named_leaves(placement.packed)
    for name, leaf in named_leaves(structs).items():
        own = described[name]
        assert (leaf.shape, leaf.dtype) == (own.shape, own.dtype)
        assert leaf.sharding.is_equivalent_to(own.sharding, leaf.ndim)
    assert jax.tree.map(lambda x: x.sharding, placement.packed) == (
        placement.packed_shardings
    )
    back, held = placement.unpack(packed), named_leaves(state)
    for name, leaf in named_leaves(back).items():
        assert leaf.sharding.is_equivalent_to(held[name].sharding, leaf.ndim)
        if name != "key":
            assert np.array_equal(leaf, held[name]), name


@pytest.fixture
def compile_only(monkeypatch: pytest.MonkeyPatch) -> Placement:
    """What an engine has whose devices are not here."""
    own = make_engine(1, FUSED, seed=5, precision="bf16").placement
    monkeypatch.setattr(placing, "are_present", lambda mesh: False)
    return dataclasses.replace(own)


def test_compile_only_devices_get_shapes_for_arrays(compile_only, compiled):
    def init(key):
        raise AssertionError("nothing is initialised")

    packed = compile_only.initial_state(init, 0)
    assert jax.tree.leaves(packed) == jax.tree.leaves(compile_only.packed)
    logical = compile_only.unpack(packed)
    assert logical.params["kernel"].shape == (256, 64)
    assert isinstance(logical.params["kernel"], jax.ShapeDtypeStruct)
    assert compiled == []


def test_call_that_runs_is_refused_on_compile_only_devices(compile_only):
    message = (
        r"^step: this engine's mesh has 8 compile-only cpu: it can explain\(\) and "
        r"lower\(\) its step, not run it\. To run, make the mesh from jax\.devices\(\)"
    )
    with pytest.raises(RuntimeError, match=message):
        compile_only.require_devices("step")


def test_call_that_runs_is_let_through_on_devices_that_are_present():
    make_engine().placement.require_devices("step")
