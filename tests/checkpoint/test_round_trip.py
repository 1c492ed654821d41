"""Does a tree come back bit for bit, whatever its classes and wherever it goes?"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint import Checkpoints

Bits = Callable[[Any], list[bytes]]


def place(name: str) -> jax.sharding.Sharding:
    """Make a sharding from "4x2 data,tensor" (mesh, then the axis of each dim)."""
    shape, _, axes = name.partition(" ")
    if shape == "one":
        return SingleDeviceSharding(jax.devices()[5])
    sizes = tuple(map(int, shape.split("x")))
    names = ("data", "tensor")[: len(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    dims = [axis or None for axis in axes.split(",")] if axes else []
    return NamedSharding(mesh, P(*dims))


PLACES = (
    "8 data",
    "8 ,data",
    "8 ",
    "4x2 data,tensor",
    "4x2 tensor",
    "2x4 tensor,data",
    "2x4 ,tensor",
    "one",
)


def abstract(tree: Any, sharding: jax.sharding.Sharding | None = None) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding
        ),
        tree,
    )


def save_and_restore(folder: Path, tree: Any, target: Any) -> Any:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree)
    checkpoints.close()
    return Checkpoints(folder).restore(target).tree


@pytest.mark.parametrize("there", PLACES)
@pytest.mark.parametrize("here", ["8 data", "4x2 data,tensor", "2x4 ,tensor", "one"])
def test_values_come_back_bit_for_bit_on_any_sharding(
    here: str, there: str, folder: Path, bits: Bits
) -> None:
    values = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    values[0, :4] = [np.nan, -0.0, np.inf, 1e-45]
    tree = {"w": jax.device_put(values, place(here))}
    restored = save_and_restore(folder, tree, abstract(tree, place(there)))
    assert bits(restored) == [values.tobytes()]
    assert restored["w"].sharding == place(there)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "bool", "uint32"])
def test_dtypes_come_back_bit_for_bit(dtype: str, folder: Path, bits: Bits) -> None:
    tree = {"w": (jnp.arange(16) * 0.37).astype(dtype).reshape(8, 2)}
    restored = save_and_restore(folder, tree, abstract(tree, place("8 data")))
    assert restored["w"].dtype == jnp.dtype(dtype)
    assert bits(restored) == bits(tree)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_come_back_as_keys(impl: str, folder: Path) -> None:
    key = jax.random.key(3, impl=impl)
    tree = {"key": key, "keys": jax.random.split(key, 8)}
    target = {
        "key": jax.ShapeDtypeStruct((), key.dtype, sharding=place("8 ")),
        "keys": jax.ShapeDtypeStruct((8,), key.dtype, sharding=place("8 data")),
    }
    restored = save_and_restore(folder, tree, target)
    assert restored["key"].dtype == key.dtype
    assert restored["keys"].sharding.is_equivalent_to(place("8 data"), 1)
    for name in tree:
        assert jnp.array_equal(
            jax.random.key_data(restored[name]), jax.random.key_data(tree[name])
        )


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3, mask={"a": True, "b": False}),
        optax.adafactor(1e-3),
        optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 4).gradient_transformation(),
    ],
    ids=["adamw", "adafactor", "multisteps"],
)
def test_optimizer_states_come_back(
    optimizer: optax.GradientTransformation, folder: Path, bits: Bits
) -> None:
    params = {"a": jnp.ones((256, 128)), "b": jnp.ones(8)}
    state = optimizer.init(params)
    grads = jax.tree.map(lambda leaf: leaf * 0.1, params)
    _, state = jax.jit(optimizer.update)(grads, state, params)
    restored = save_and_restore(folder, state, abstract(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)


class Moments(NamedTuple):
    mean: jax.Array
    square: jax.Array | None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["layers", "moments"], meta_fields=[]
)
@dataclasses.dataclass
class State:
    layers: dict[int, Any]
    moments: Moments


def test_a_tree_of_other_classes_takes_the_same_leaves(
    folder: Path, bits: Bits
) -> None:
    layers = {0: (jnp.ones(2), jnp.zeros(3)), 10: {"a.b/../c": jnp.full(4, 2.0)}}
    state = State(layers, Moments(jnp.arange(5), None))
    plain = {"layers": layers, "moments": {"mean": state.moments.mean, "square": None}}
    restored = save_and_restore(folder, state, abstract(plain))
    assert jax.tree.structure(restored) == jax.tree.structure(plain)
    assert bits(restored) == bits(state)


def test_names_that_look_like_paths_stay_inside_the_folder(folder: Path) -> None:
    tree = {"../../evil": jnp.ones(2)}
    assert jnp.array_equal(
        save_and_restore(folder, tree, abstract(tree))["../../evil"], jnp.ones(2)
    )
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_tree_that_is_one_array_comes_back(folder: Path, bits: Bits) -> None:
    assert bits(save_and_restore(folder, jnp.arange(3), jnp.zeros(3, int))) == bits(
        jnp.arange(3)
    )


def test_leaves_without_elements_come_back(folder: Path) -> None:
    tree = {"none": jnp.zeros((0, 4), jnp.bfloat16), "some": jnp.ones(2)}
    restored = save_and_restore(folder, tree, abstract(tree, place("8 ")))
    assert restored["none"].shape == (0, 4)
    assert restored["none"].dtype == jnp.bfloat16
    assert restored["none"].sharding == place("8 ")


def test_a_target_in_host_memory_gets_its_memory_kind(folder: Path, bits: Bits) -> None:
    host = place("8 data").with_memory_kind("pinned_host")
    tree = {"w": jax.device_put(jnp.arange(16.0), host)}
    restored = save_and_restore(folder, tree, abstract(tree))
    assert restored["w"].sharding.memory_kind == "pinned_host"
    assert bits(restored) == bits(tree)


def test_arrays_as_target_lend_their_shardings(folder: Path, bits: Bits) -> None:
    tree = {"w": jnp.arange(16.0)}
    target = {"w": jax.device_put(jnp.zeros(16), place("8 data"))}
    restored = save_and_restore(folder, tree, target)
    assert restored["w"].sharding == place("8 data")
    assert bits(restored) == bits(tree)
