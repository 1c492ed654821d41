"""How does a model see other shards of a batch: means, and all-to-all over experts.

A loss function runs on a shard's rows of a micro-batch. A balance loss of experts needs
statistics of all its rows, and experts that are split over devices need other shards'
tokens. Both functions are the identity on one device, and where the loss sees full
micro-batches.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxpar.jaxprs.device import device_kind
from jaxpar.mesh import BATCH_AXES, EXPERT

Tree = TypeVar("Tree")

PARTS = "jaxpar_parts"
"""The axis of micro-batches that the check of a loss computes side by side."""

_MEANS: contextvars.ContextVar[list[None] | None]
_MEANS = contextvars.ContextVar("batch_means", default=None)


def batch_mean(x: Tree) -> Tree:
    """Average over the shards of a micro-batch's rows.

    The mean over all rows, if `x` is a mean over the rows that the caller sees; a sum
    over all rows, divided by the number of shards, if it is a sum.

    Args:
      x: arrays of floats, any shapes.

    Returns:
      The averages, the same on every shard; differentiable.

    Example:
      >>> load_E = jnp.array([0.25, 0.75])
      >>> batch_mean(load_E).tolist()
      [0.25, 0.75]
    """
    if (made := _MEANS.get()) is not None:
        made.append(None)
    axes = bound_axes((*BATCH_AXES, PARTS))
    if not axes:
        return x

    def mean(leaf: jax.Array) -> jax.Array:
        # In fp32: a statistic, and XLA:CPU aborts on a reduction in bf16.
        return jax.lax.pmean(leaf.astype(jnp.float32), axes).astype(leaf.dtype)

    return jax.tree.map(mean, x)


def all_to_all(x: jax.Array, *, split: int, concat: int) -> jax.Array:
    """All-to-all over the expert axis; tiled, as `jax.lax.all_to_all`.

    Shard i gets the i-th part of every shard's array. With tokens sorted by expert,
    ``[E, C, D]``, ``all_to_all(x, split=0, concat=1)`` gives each shard the tokens of
    its own experts, ``[E / n, n C, D]``; ``all_to_all(y, split=1, concat=0)`` brings
    them back.

    Args:
      x: this shard's array.
      split: the dim to cut into n parts, n being the size of the axis.
      concat: the dim along which the parts received are concatenated.

    Returns:
      The array received; `x` itself where no expert axis splits the rows.

    Raises:
      ValueError: if n does not divide the dim.

    Example:
      >>> all_to_all(jnp.ones((4, 8, 16)), split=0, concat=1).shape
      (4, 8, 16)
    """
    if not bound_axes((EXPERT,)):
        return x
    ways = jax.lax.axis_size(EXPERT)
    if x.shape[split] % ways:
        raise ValueError(
            f"all_to_all: dim {split} of shape {x.shape} has {x.shape[split]} "
            f"elements, which expert={ways} does not divide. Make it a multiple of "
            f"{ways}, as the number of experts is."
        )
    return jax.lax.all_to_all(x, EXPERT, split, concat, tiled=True)


def gather_over_experts(x: jax.Array) -> jax.Array:
    """Gather the rows (dim 0) of all shards of the expert axis; `x` where none is."""
    if not bound_axes((EXPERT,)):
        return x
    # Its gradient is a sum over the axis, which XLA:CPU aborts on in bf16.
    wide = x.astype(jnp.float32) if _is_half(x) and device_kind() == "cpu" else x
    return jax.lax.all_gather(wide, EXPERT, axis=0, tiled=True).astype(x.dtype)


def sum_over_experts(x: jax.Array) -> jax.Array:
    """Sum over the shards of the expert axis, and keep this shard's rows (dim 0).

    The way back of `gather_over_experts`; in fp32, if `x` is.
    """
    if not bound_axes((EXPERT,)):
        return x
    return jax.lax.psum_scatter(x, EXPERT, scatter_dimension=0, tiled=True)


def bound_axes(names: Sequence[str]) -> tuple[str, ...]:
    """Which of some axes are manual here, or mapped over, and have several members."""
    return tuple(name for name in names if _size(name) > 1)


def _is_half(x: jax.Array) -> bool:
    return x.dtype in (jnp.bfloat16, jnp.float16)


def _size(name: str) -> int:
    try:
        return jax.lax.axis_size(name)
    except NameError:
        return 1


@contextlib.contextmanager
def counting_means() -> Iterator[list[None]]:
    """Count the calls of `batch_mean` in this context."""
    made: list[None] = []
    token = _MEANS.set(made)
    try:
        yield made
    finally:
        _MEANS.reset(token)
