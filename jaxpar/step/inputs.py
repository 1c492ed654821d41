"""What is a loss function given besides the model: rows, what is not rows, the step.

A batch is a pytree whose leaves count examples in their leading dim, but for what is
wrapped in `Replicated`: a class weight, a schedule's value, an adjacency matrix. Or the
leading dim counts `Packed` graphs, each of which is a call of its own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import DATA
from jaxpar.tree import named_leaves
from jaxpar.types import Batch, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replicated:
    """A part of a batch that is not rows: every device and micro-batch gets it whole.

    In a run of several processes each passes the same values. The loss function is
    given the value itself.

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

    The loss function is called with one pack, without that dim; a shard's packs are
    computed one after another, so that the numbers are the same on every mesh. A plain
    loss is averaged over packs, a `jaxpar.Weighted` is summed. Where the model changes
    its state, every device computes the packs of all shards, each from the state that
    the one before it left.

    Attributes:
      packs: a pytree of arrays, the packs first; their number is a multiple of data x
        accumulate.

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
      keys: the data of their keys, [packs, ...].
    """

    packs: PyTree
    keys: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnePack:
    """What one call of the loss function is given of packs; counts as one row.

    Attributes:
      pack: without the dim that counts packs.
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


def make_inputs(batch: Batch, step: Any) -> Inputs:
    """Join a batch and a step's number (an array or its shape)."""
    return Inputs(batch, Replicated(step))


def abstract_inputs(rows: Batch) -> Inputs:
    """The shapes of one call's inputs, of the shapes of a batch."""
    if isinstance(rows, Packed):
        rows = OnePack(
            map_rows(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows.packs)
        )
    return make_inputs(rows, jax.ShapeDtypeStruct((), jnp.int32))


def with_keys(inputs: Inputs, key: jax.Array) -> Inputs:
    """Give each pack of a global batch the key of its place in it.

    Args:
      inputs: those without packs come back as they are.
      key: of the step.
    """
    if not isinstance(inputs.batch, Packed):
        return inputs
    places = jnp.arange(num_rows(inputs))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, places)
    keyed = KeyedPacks(inputs.batch.packs, jax.random.key_data(keys))
    return dataclasses.replace(inputs, batch=keyed)


def map_rows(fn: Callable[[Any], Any], batch: PyTree) -> PyTree:
    """Map the leaves that are rows; the others stay as they are."""
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
    """The shapes of a batch of twice as many rows."""

    def double(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)

    return map_rows(double, batch)


def specs_of(batch: PyTree) -> PyTree:
    """Rows over data; what is `Replicated` on every device."""

    def spec(x: Any) -> Any:
        return jax.tree.map(lambda _: P(), x) if _is_replicated(x) else P(DATA)

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
    """Refuse packs where they can't be.

    Args:
      batch: any batch.
      num_stages: of the pipeline; 1 without.
      coupled_batch: as given to `jaxpar.initialize`.

    Raises:
      ValueError: if the batch is packed in part, or goes through a pipeline, or its
        loss is said to couple packs.
    """
    is_packed = isinstance(batch, Packed)
    inner = jax.tree.leaves(
        batch.packs if is_packed else batch, is_leaf=lambda x: isinstance(x, Packed)
    )
    if any(isinstance(x, Packed) for x in inner):
        raise ValueError(
            "sample_batch: jaxpar.Packed is in the batch, but must be the whole of it: "
            "jaxpar.Packed({...}), every leaf with the packs first."
        )
    if is_packed and num_stages > 1:
        raise ValueError(
            f"sample_batch: a jaxpar.Packed can't go through a pipeline, but pipe="
            f"{num_stages}; use a mesh of data and tensor."
        )
    if is_packed and coupled_batch:
        raise ValueError(
            "coupled_batch=True: loss_fn is given each pack of jaxpar.Packed alone, "
            "and may couple all that is in it; leave coupled_batch out."
        )


def _is_replicated(x: Any) -> bool:
    return isinstance(x, Replicated)


def _is_wrapped(x: Any) -> bool:
    return isinstance(x, (Replicated, OnePack))
