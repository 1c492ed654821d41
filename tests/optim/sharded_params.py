"""A few parameters, stored over a mesh of eight devices by ZeRO stage 1."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxpar import tree
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.zero import shard_leaves, zero_stage

SHAPES = {"bias": (6,), "blocks": (3, 64, 24), "kernel": (64, 16)}
"""The bias is too small to be split; the others are, by all eight devices."""

COMPUTE = {"bias": (None,), "blocks": (None, None, "tensor"), "kernel": (None, None)}


def mesh() -> jax.sharding.Mesh:
    return make_mesh(MeshShape(data=4, tensor=2))


def make_params(seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()
    }


def leaf_shardings(zero: int = 1) -> tuple[LeafSharding, ...]:
    structs = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in SHAPES.items()}
    sizes = mesh().shape
    return tuple(shard_leaves(structs, COMPUTE, zero_stage(zero), sizes).values())


def placed(params: Any, zero: int = 1) -> Any:
    """A tree of leaves with parameters' names, each where its parameter is stored."""
    specs = {leaf.name: leaf.stored_spec for leaf in leaf_shardings(zero)}

    def place(path: tuple, leaf: Any) -> jax.Array:
        spec = specs.get(tree.path_name(path).rpartition("/")[2])
        on = NamedSharding(mesh(), spec or jax.sharding.PartitionSpec())
        return jax.device_put(leaf, on)

    return jax.tree_util.tree_map_with_path(place, params)
