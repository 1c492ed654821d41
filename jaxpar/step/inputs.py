"""What does a loss function get besides the model: rows, replicated values, the step.

A batch is a pytree whose leaves have the examples as their leading dim, except those
wrapped in `Replicated`: a class weight, a schedule's value, an adjacency matrix. Or the
leading dim counts `Packed` graphs, one call of the loss function each.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import DATA
from jaxpar.sharding.constrain import constrain
from jaxpar.tree import named_leaves
from jaxpar.types import Batch, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replicated:
    """A part of a batch that is not rows: replicated to every device and micro-batch.

    In a run of several processes, each must pass the same values. The loss function
    gets the value itself.

    Attributes:
      value: an array of any shape, or a pytree of them.

    Example:
      >>> batch = {"x": jnp.ones((8, 4)), "class_weight": Replicated(jnp.ones(3))}
      >>> num_rows(batch)
      8
    """

    value: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A batch whose leading dim counts packs, such as jraph's padded graphs.

    The loss function is called with one pack, without that dim. A shard computes its
    packs one after another, so results are the same on every mesh. A plain loss is
    averaged over packs, a `jaxpar.Weighted` is summed. If the model changes its state,
    every device computes the packs of all shards in order, and each pack starts from
    the state after the previous one.

    Attributes:
      packs: a pytree of arrays whose leading dim counts packs; their number is a
        multiple of data x accumulate.

    Example:
      >>> graphs = {"nodes": jnp.ones((8, 30, 4)), "senders": jnp.zeros((8, 50), int)}
      >>> num_rows(Packed(graphs))
      8
    """

    packs: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyedPacks:
    """Packs, each with its own random key.

    Attributes:
      packs: as in `Packed`.
      keys: the key data of every pack, [packs, ...].
    """

    packs: PyTree
    keys: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnePack:
    """One pack, for one call of the loss function; counts as one row.

    Attributes:
      pack: the pack, without the leading dim of `Packed`.
    """

    pack: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """A batch, or some of its rows, and the number of the step.

    Attributes:
      batch: as the user passed it, on the mesh.
      step: steps taken before this one; an int32 scalar, `Replicated`.
    """

    batch: Batch
    step: Any

    def microbatch(self, index: jax.Array | int, accumulate: int) -> "Inputs":
        """Select a micro-batch, see `microbatch_rows`."""
        return microbatch_rows(self, index, accumulate)


def make_inputs(batch: Batch, step: Any) -> Inputs:
    """Combine a batch and a step's number (an array or its shape)."""
    return Inputs(batch, Replicated(step))


def abstract_inputs(rows: Batch) -> Inputs:
    """The shapes of one call's inputs, from the shapes of a batch."""
    if isinstance(rows, Packed):
        rows = OnePack(
            map_rows(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows.packs)
        )
    return make_inputs(rows, jax.ShapeDtypeStruct((), jnp.int32))


def with_keys(inputs: Inputs, key: jax.Array) -> Inputs:
    """Give each pack of a global batch a key made from its position.

    Args:
      inputs: returned unchanged if they have no packs.
      key: the step's key.
    """
    if not isinstance(inputs.batch, Packed):
        return inputs
    places = jnp.arange(num_rows(inputs))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, places)
    keyed = KeyedPacks(inputs.batch.packs, jax.random.key_data(keys))
    return dataclasses.replace(inputs, batch=keyed)


def map_rows(fn: Callable[[Any], Any], batch: PyTree) -> PyTree:
    """Map the leaves that are rows; the others are unchanged."""
    return jax.tree.map(
        lambda x: x if isinstance(x, Replicated) else fn(x),
        batch,
        is_leaf=_is_replicated,
    )


def num_rows(batch: PyTree) -> int:
    """Count the examples, or the packs."""
    leaves = jax.tree.leaves(batch, is_leaf=_is_wrapped)
    first = next(x for x in leaves if not _is_replicated(x))
    return 1 if isinstance(first, OnePack) else first.shape[0]


def twice_the_rows(batch: PyTree) -> PyTree:
    """The shapes of a batch with twice as many rows."""

    def double(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)

    return map_rows(double, batch)


def specs_of(batch: PyTree, rows: P) -> PyTree:
    """Specs: `rows` for rows; `Replicated` values are on every device."""

    def spec(x: Any) -> Any:
        return jax.tree.map(lambda _: P(), x) if _is_replicated(x) else rows

    return jax.tree.map(spec, batch, is_leaf=_is_replicated)


def replicated_names(batch: PyTree) -> frozenset[str]:
    """Names of the leaves that are not rows."""

    def flag(x: Any) -> Any:
        return jax.tree.map(lambda _: True, x) if _is_replicated(x) else False

    flags = jax.tree.map(flag, batch, is_leaf=_is_replicated)
    return frozenset(name for name, is_set in named_leaves(flags).items() if is_set)


def unwrapped(batch: PyTree) -> PyTree:
    """The batch as the loss function sees it."""

    def unwrap(x: Any) -> Any:
        if isinstance(x, OnePack):
            return unwrapped(x.pack)
        return x.value if isinstance(x, Replicated) else x

    return jax.tree.map(unwrap, batch, is_leaf=_is_wrapped)


def check_packed(batch: Batch, num_stages: int, *, coupled_batch: bool) -> None:
    """Raise if packs can't be used.

    Args:
      batch: any batch.
      num_stages: stages of the pipeline; 1 without one.
      coupled_batch: as given to `jaxpar.initialize`.

    Raises:
      ValueError: if only a part of the batch is packed, the mesh has a pipeline, or
        `coupled_batch` is set.
    """
    is_packed = isinstance(batch, Packed)
    inner = jax.tree.leaves(
        batch.packs if is_packed else batch, is_leaf=lambda x: isinstance(x, Packed)
    )
    if any(isinstance(x, Packed) for x in inner):
        raise ValueError(
            "sample_batch: jaxpar.Packed is inside the batch, but must be around all "
            "of it: jaxpar.Packed({...}), with packs as every leaf's leading dim."
        )
    if is_packed and num_stages > 1:
        raise ValueError(
            f"sample_batch: a jaxpar.Packed can't go through a pipeline, but pipe="
            f"{num_stages}; use a mesh of data and tensor."
        )
    if is_packed and coupled_batch:
        raise ValueError(
            "coupled_batch=True: loss_fn is called with one pack of jaxpar.Packed at a "
            "time and may couple everything in it; leave coupled_batch out."
        )


def _is_replicated(x: Any) -> bool:
    return isinstance(x, Replicated)


def _is_wrapped(x: Any) -> bool:
    return isinstance(x, (Replicated, OnePack))


def microbatch_rows(inputs: Inputs, index: jax.Array | int, accumulate: int) -> Inputs:
    """Select micro-batch m: rows m, m + accumulate and so on.

    The same rows result for each data shard's rows and for the global batch.
    """

    def pick(x: jax.Array) -> jax.Array:
        split = x.reshape(x.shape[0] // accumulate, accumulate, *x.shape[1:])
        return constrain(jax.lax.dynamic_index_in_dim(split, index, 1, False), DATA)

    return map_rows(pick, inputs)
