"""What does a language model minimise: cross entropy over a large vocabulary.

Logits, [tokens, vocabulary], are the largest array of a training step. `cross_entropy`
takes the head with it: logits exist for a chunk of tokens at a time, and their gradient
is made while they are there.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpar.jaxprs.device import device_kind
from jaxpar.losses.logits import (
    Statistics,
    hide_columns,
    in_one_pass,
    in_two_passes,
    is_target_of,
)
from jaxpar.mesh import DATA
from jaxpar.sharding.constrain import constrain, rows_are_automatic
from jaxpar.sharding.tensor import VOCAB
from jaxpar.step.weighted import Weighted

CHUNK_BYTES = 2**30
"""The largest logits of a chunk on a device: with them its matmuls read little else."""

_HEADROOM = 2.0**14
"""fp16 gradients of logits are scaled to it: below 6e-8 they would be 0."""


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What a token's loss is, beside its activations and its target."""

    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    logits_dtype: jnp.dtype
    num_chunks: int
    tokens_axis: str | None
    num_classes: int | None = None

    @property
    def num_parts(self) -> int:
        """Pieces that the tokens of a row are split into over the mesh."""
        return _size_of(self.tokens_axis)


_Saved = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array, tuple]


def cross_entropy(  # noqa: PLR0913 - keywords, each of its own kind
    hidden_BTD: Float[Array, "B T D"],
    kernel_DV: Float[Array, "D V"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"] | None = None,
    *,
    bias_V: Float[Array, "V"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    logits_dtype: DTypeLike | None = None,
    num_chunks: int | None = None,
    num_classes: int | None = None,
    tokens_axis: str | None = None,
) -> Weighted:
    """Sum the cross entropy of targets, in nats, from the input of the head.

    Where gradients are asked for, they are made in the forward pass, from the logits
    that are there; the backward pass scales them. Statistics are in fp32. On a mesh the
    vocabulary is split over tensor (and pipe), as `kernel_DV` is.

    Args:
      hidden_BTD: activations behind the last norm.
      kernel_DV: the head, or the transposed embedding table.
      targets_BT: the token to predict at each place, from 0 to V - 1.
      weights_BT: of each target, 0 for one that does not count; None for 1.
      bias_V: of the head, added to logits before the soft cap; None for none.
      label_smoothing: share of the target that is spread over the vocabulary.
      z_loss: factor of the squared log of the sum of exponentials.
      soft_cap: bound of the logits, ``soft_cap * tanh(logits / soft_cap)``.
      logits_dtype: of logits; None for that of `hidden_BTD`. fp32 logits of half
        precision take twice the memory traffic.
      num_chunks: into which T is cut, a divisor of it; None for as few as keep the
        logits of one below `CHUNK_BYTES`. In a coupled loss there is one.
      num_classes: columns of the head that are predicted; those behind, with which a
        vocabulary is rounded up, have no share. None for all.
      tokens_axis: mesh axis that the tokens of `hidden_BTD` are split over where its
        gradient goes, as in sequence parallelism: that is scattered over it.

    Returns:
      The weighted sum over targets and the sum of weights, fp32.

    Raises:
      ValueError: if shapes do not fit, or a number is out of range.

    Example:
      >>> hidden, kernel = jnp.zeros((2, 4, 8)), jnp.zeros((8, 256))
      >>> loss = cross_entropy(hidden, kernel, jnp.zeros((2, 4), int))
      >>> print(f"{loss.total / loss.weight:.3f}")  # log 256
      5.545

    Source: the chunks are those of Hsu et al., "Liger Kernel" (2024); the z-loss is
    that of Chowdhery et al., "PaLM" (2022).
    """
    if weights_BT is None:
        weights_BT = jnp.ones(targets_BT.shape, jnp.float32)
    _require_shapes(hidden_BTD, kernel_DV, targets_BT, weights_BT)
    _require_bias(bias_V, kernel_DV)
    dtype = jnp.dtype(logits_dtype or hidden_BTD.dtype)
    if num_chunks is None:
        num_chunks = _fewest_chunks(hidden_BTD, kernel_DV, dtype, tokens_axis)
    how = dtype, num_chunks, tokens_axis, num_classes
    rule = _Rule(label_smoothing, z_loss, soft_cap, *how)
    _require_rule(rule, hidden_BTD.shape[1], kernel_DV.shape[1])
    weights_BT = weights_BT.astype(jnp.float32)
    given = hidden_BTD, kernel_DV, bias_V, targets_BT, weights_BT
    total = _whole_total if rows_are_automatic() else _total
    return Weighted(total(rule, *given), weights_BT.sum())


def _require_shapes(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
) -> None:
    if hidden.ndim != 3 or kernel.ndim != 2 or hidden.shape[2] != kernel.shape[0]:
        raise ValueError(
            f"cross_entropy: hidden_BTD {hidden.shape} and kernel_DV {kernel.shape} "
            "must be [B, T, D] and [D, V]; a table of embeddings is transposed."
        )
    for name, array in (("targets_BT", targets), ("weights_BT", weights)):
        if array.shape != hidden.shape[:2]:
            raise ValueError(
                f"cross_entropy: {name} {array.shape} must have one entry for each "
                f"place of hidden_BTD {hidden.shape}."
            )


def _require_bias(bias: jax.Array | None, kernel: jax.Array) -> None:
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(
            f"cross_entropy: bias_V {bias.shape} must have one entry for each column "
            f"of kernel_DV {kernel.shape}; None for no bias."
        )


def _require_rule(rule: _Rule, length: int, columns: int) -> None:
    if rule.num_classes is not None and not 1 <= rule.num_classes <= columns:
        raise ValueError(
            f"cross_entropy: num_classes={rule.num_classes} must be from 1 to the "
            f"{columns} columns of kernel_DV; None for all."
        )
    if not 0 <= rule.label_smoothing < 1:
        raise ValueError(
            f"cross_entropy: label_smoothing={rule.label_smoothing} must be at least 0 "
            "and below 1."
        )
    if rule.soft_cap is not None and rule.soft_cap <= 0:
        raise ValueError(
            f"cross_entropy: soft_cap={rule.soft_cap} must be above 0; None for none."
        )
    if length % rule.num_parts:
        raise ValueError(
            f"cross_entropy: tokens_axis={rule.tokens_axis!r} has {rule.num_parts} "
            f"devices, which must divide the {length} tokens of a row; None for rows "
            "that are not split."
        )
    if rule.num_chunks < 1 or length % (rule.num_chunks * rule.num_parts):
        split = f", in {rule.num_parts} parts" if rule.num_parts > 1 else ""
        raise ValueError(
            f"cross_entropy: num_chunks={rule.num_chunks} must divide the {length} "
            f"tokens of a row{split}; None chooses."
        )


def _fewest_chunks(
    hidden: jax.Array, kernel: jax.Array, dtype: jnp.dtype, tokens_axis: str | None
) -> int:
    rows, length, _ = hidden.shape
    shards = math.prod(map(_size_of, VOCAB))
    whole = rows * length * kernel.shape[1] * dtype.itemsize / shards
    own = max(1, length // _size_of(tokens_axis))
    fewest = min(own, math.ceil(whole / CHUNK_BYTES))
    return next(n for n in range(fewest, own + 1) if own % n == 0)


def _size_of(axis: str | None) -> int:
    sizes = jax.sharding.get_abstract_mesh().shape
    return 1 if axis is None else sizes.get(axis, 1)


def _whole_total(
    rule: _Rule,
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    bias_V: jax.Array | None,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
) -> jax.Array:
    """Sum the loss in one chunk, with JAX's own gradients.

    In a loop over chunks, the compiler would reduce the gradients of rows on several
    devices once a chunk.
    """
    logits = _logits(rule, hidden_BTD, kernel_DV, bias_V)
    found = in_two_passes(logits, is_target_of(logits, targets_BT))
    return (_losses(rule, logits, found) * weights_BT).sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(
    rule: _Rule,
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    bias_V: jax.Array | None,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
) -> jax.Array:
    def add(total: jax.Array, chunk: tuple) -> tuple[jax.Array, None]:
        hidden, targets, weights = chunk
        logits = _logits(rule, hidden, kernel_DV, bias_V)
        losses = _losses(rule, logits, _statistics(logits, targets))
        return total + (losses * weights).sum(), None

    chunks = _cut(rule, hidden_BTD, targets_BT, weights_BT)
    return jax.lax.scan(add, jnp.float32(0), chunks)[0]


def _forward(
    rule: _Rule,
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    bias_V: jax.Array | None,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
) -> tuple[jax.Array, _Saved]:
    dtype = hidden_BTD.dtype
    is_fp16, wide = dtype == jnp.float16, jnp.promote_types(dtype, jnp.float32)
    kept = wide if is_fp16 else dtype  # fp16 can't hold it unscaled.
    scale = _HEADROOM / jnp.maximum(jnp.abs(weights_BT).max(), 1e-30) if is_fp16 else 1

    def add(carry: tuple, chunk: tuple) -> tuple[tuple, tuple]:
        total, kernel_grad, bias_grad = carry
        hidden, targets, weights = chunk
        logits = _logits(rule, hidden, kernel_DV, bias_V)
        found = _statistics(logits, targets)
        losses = _losses(rule, logits, found)
        grad = _gradient(rule, logits, found, targets) * (scale * weights)[..., None]
        grad = constrain(grad.astype(dtype), DATA, None, VOCAB)
        # Not of merged rows: tokens may be split over tensor from here on.
        hidden_grad = jnp.matmul(grad, kernel_DV.T, preferred_element_type=kept)
        kernel_grad += jnp.einsum(
            "nd,nv->dv", _rows(hidden), _rows(grad), preferred_element_type=wide
        )
        if bias_grad is not None:
            bias_grad += grad.sum((0, 1), dtype=wide)
        hidden_grad = constrain(hidden_grad, DATA, rule.tokens_axis)
        if is_fp16:
            hidden_grad /= scale
        total += (losses * weights).sum()
        return (total, kernel_grad, bias_grad), (hidden_grad, losses)

    like = kernel_DV, bias_V
    start = jnp.float32(0), *jax.tree.map(lambda x: jnp.zeros(x.shape, wide), like)
    chunks = _cut(rule, hidden_BTD, targets_BT, weights_BT)
    (total, *grads), parts = jax.lax.scan(add, start, chunks)
    hidden_grad, losses_BT = (_joined(rule, part) for part in parts)
    kernel_grad, bias_grad = jax.tree.map(lambda x: x / scale, tuple(grads))
    dtypes = jax.tree.map(lambda x: x[:0], (hidden_BTD, *like))
    return total, (hidden_grad, kernel_grad, bias_grad, losses_BT, dtypes)


def _backward(
    rule: _Rule, saved: _Saved, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None, None, jax.Array]:
    del rule
    *grads, losses_BT, dtypes = saved
    hidden, kernel, bias = jax.tree.map(
        lambda grad, like: (cotangent * grad).astype(like.dtype), tuple(grads), dtypes
    )
    return hidden, kernel, bias, None, cotangent * losses_BT


_total.defvjp(_forward, _backward)


def _logits(
    rule: _Rule, hidden: jax.Array, kernel_DV: jax.Array, bias_V: jax.Array | None
) -> jax.Array:
    """Logits of a chunk, at least fp32; in memory they are of the rule's dtype."""
    dtype = rule.logits_dtype
    logits = jnp.matmul(hidden, kernel_DV, preferred_element_type=dtype)
    logits = constrain(logits, DATA, None, VOCAB)
    wide = logits.astype(jnp.promote_types(dtype, jnp.float32))
    wide = wide if bias_V is None else wide + bias_V
    if rule.soft_cap is not None:
        wide = rule.soft_cap * jnp.tanh(wide / rule.soft_cap)
    return hide_columns(wide, rule.num_classes)


def _smooth(rule: _Rule, logits: jax.Array) -> jax.Array:
    """The share that label smoothing gives each column."""
    num_classes = rule.num_classes or logits.shape[-1]
    is_class = jnp.arange(logits.shape[-1]) < num_classes
    return rule.label_smoothing / num_classes * is_class


def _losses(rule: _Rule, logits: jax.Array, found: Statistics) -> jax.Array:
    losses = found.norm - (1 - rule.label_smoothing) * found.target
    if rule.label_smoothing:
        losses -= (_smooth(rule, logits) * logits).sum(-1)
    if rule.z_loss:
        losses += rule.z_loss * jnp.square(found.norm)
    return losses


def _gradient(
    rule: _Rule, logits: jax.Array, found: Statistics, targets: jax.Array
) -> jax.Array:
    """The gradient of each token's loss by its logits, before the soft cap."""
    share = jnp.exp(logits - found.norm[..., None])
    if rule.z_loss:
        share *= 1 + 2 * rule.z_loss * found.norm[..., None]
    grad = share - (1 - rule.label_smoothing) * is_target_of(logits, targets)
    if rule.label_smoothing:
        grad -= _smooth(rule, logits)
    if rule.soft_cap is not None:
        grad *= 1 - jnp.square(logits / rule.soft_cap)
    return grad


def _statistics(logits: jax.Array, targets: jax.Array) -> Statistics:
    one_read = device_kind() != "cpu"  # Which vectorises simple sums alone.
    is_target = is_target_of(logits, targets)
    return (in_one_pass if one_read else in_two_passes)(logits, is_target)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _cut(rule: _Rule, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Chunks of tokens, first: of each part of a row, so that tokens stay in theirs."""
    split = rule.num_parts, rule.num_chunks
    parted = [x.reshape(len(x), *split, -1, *x.shape[2:]) for x in arrays]
    first = [jnp.moveaxis(x, 2, 0) for x in parted]
    return tuple(x.reshape(*x.shape[:2], -1, *x.shape[4:]) for x in first)


def _joined(rule: _Rule, x: jax.Array) -> jax.Array:
    """Undo `_cut`."""
    parted = x.reshape(*x.shape[:2], rule.num_parts, -1, *x.shape[3:])
    last = jnp.moveaxis(parted, 0, 2)
    return last.reshape(len(last), -1, *x.shape[3:])
