"""What is known of logits in one pass over them, and which of them count."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_HIDDEN = -1e9
"""The logit of a column that stands for nothing."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Of each token's logits, [B, T]: log of the sum of exponentials, the target's."""

    norm: jax.Array
    target: jax.Array


def hide_columns(
    logits: Float[Array, "*dims V"], num_classes: int | None
) -> Float[Array, "*dims V"]:
    """Take the share of the last columns of logits; None for all columns to stay."""
    if num_classes is None or num_classes >= logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < num_classes, logits, _HIDDEN)


def is_target_of(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Which logit, [..., V], is its target's.

    Selected by comparison and sum, a target's logit fuses with the pass over all of
    them, also on a sharded vocabulary. The gradient of a gather would be a scatter into
    an array of the logits' size.
    """
    return jnp.arange(logits.shape[-1]) == targets[..., None]


def in_two_passes(logits: jax.Array, is_target: jax.Array) -> Statistics:
    """Statistics by simple sums, which any compiler vectorises and splits."""
    norm = jax.nn.logsumexp(logits, axis=-1)
    return Statistics(norm, jnp.where(is_target, logits, 0).sum(-1))


def in_one_pass(logits: jax.Array, is_target: jax.Array) -> Statistics:
    """As `in_two_passes`, with one read of the logits: the largest so far rescales."""
    none, zero = jnp.array(-jnp.inf, logits.dtype), jnp.zeros((), logits.dtype)

    def merge(one: tuple, other: tuple) -> tuple:
        largest = jnp.maximum(one[0], other[0])
        shift = jnp.where(largest == -jnp.inf, 0.0, largest)
        sums = [each[1] * jnp.exp(each[0] - shift) for each in (one, other)]
        return largest, sums[0] + sums[1], one[2] + other[2]

    target = jnp.where(is_target, logits, 0)
    given = logits, jnp.ones_like(logits), target
    axes = (logits.ndim - 1,)
    largest, total, target = jax.lax.reduce(given, (none, zero, zero), merge, axes)
    return Statistics(largest + jnp.log(total), target)
