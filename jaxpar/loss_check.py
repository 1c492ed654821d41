"""Is the loss what the engine takes it for: a mean over the rows that it is given?

The engine gives a loss function a shard's rows of a micro-batch, and averages. That is
the loss of the global batch only if the loss of some rows is the mean of the losses of
their halves. So it is compared, on every data shard, before steps 1, 2, 4, 8 and so on
(padding may first appear late): in fp32, with every random draw a constant, so that all
rows get the same noise, and on parameters with small noise, for behind a head of zeros
the loss of every row is the same.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.draws import Draw
from jaxpar.inputs import Inputs, OnePack, map_rows, num_rows
from jaxpar.loss import Sums
from jaxpar.mesh import DATA
from jaxpar.row_draws import can_be_constant
from jaxpar.state import TrainState
from jaxpar.types import Batch, Params
from jaxpar.weighted import Weighted, result

TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2
"""Relative; the second where the model itself computes in bf16 or fp16."""

_NOISE, _FLOOR = 0.1, 1e-8
"""Noise relative to a leaf's size, and the least difference of losses that counts."""


class LossCheck:
    """Compares when it is due; keeps what was warned of.

    Args:
      compare: ``(params, model_state, batch, step, key) -> {name: [2, data]}``: of each
        number the one of the rows and of their halves, by data shard, replicated.
      whole: ``(params, ...) -> {name: [2]}``: the number of the engine and of the whole
        batch; None where that may not fit.
      tolerance: relative.
    """

    def __init__(
        self,
        compare: Callable[..., Mapping[str, jax.Array]],
        whole: Callable[..., Mapping[str, jax.Array]] | None,
        tolerance: float,
    ):
        self._compare, self._whole, self._tolerance = compare, whole, tolerance
        self._steps, self._warned = 0, set()

    def before_step(self, state: Callable[[], TrainState], batch: Batch) -> None:
        """Compare before steps 1, 2, 4, 8 and so on; waits for the devices.

        Args:
          state: gives what is kept of the state.
          batch: the step's, on the mesh.

        Raises:
          ValueError: if the loss differs, or fails on half of the rows; nothing has
            changed then.

        Warns:
          UserWarning: if a metric does, once for each.
        """
        self._steps += 1
        if self._steps & (self._steps - 1):
            return
        kept = state()
        given = (kept.params, kept.model_state, batch, kept.step, kept.key)
        found = jax.device_get(self._compare(*given))
        wrong = {name: _worst(x, self._tolerance) for name, x in found.items()}
        wrong = {name: pair for name, pair in wrong.items() if pair is not None}
        if "loss" in wrong:
            self._steps -= 1  # A loss that was refused is not waved through next.
            raise ValueError(self._refusal(wrong["loss"], given))
        for name in sorted(wrong.keys() - self._warned):
            self._warned.add(name)
            warnings.warn(_of_metric(name, *wrong[name]), stacklevel=4)

    def _refusal(self, pair: tuple[float, float], given: tuple) -> str:
        rows, halves = pair
        shown = ""
        if self._whole is not None:
            engine, whole = jax.device_get(self._whole(*given)["loss"])
            shown = (
                f" Of the whole batch it is {whole:.6g}, and what the engine would "
                f"train on is {engine:.6g}."
            )
        return (
            "loss_fn: the loss is not a mean over the rows that it is given: of some "
            f"rows of a data shard it is {rows:.6g}, of their halves {halves:.6g} on "
            f"average.{shown} {_cause(rows, halves)} Return a mean over the rows "
            "(.mean()); for masked or padded rows jaxpar.Weighted(total, weight) of "
            "two sums; for a loss that couples examples pass coupled_batch=True. "
            "check_loss=False turns this check off."
        )


def _worst(numbers: np.ndarray, tolerance: float) -> tuple[float, float] | None:
    """The rows' number and the halves' where they differ most, if they differ."""
    rows, halves = numbers
    size = np.maximum(np.abs(rows), np.abs(halves))
    allowed = tolerance * size + _FLOOR
    differs = np.where(np.isfinite(halves), np.abs(rows - halves) / allowed, np.inf)
    differs = np.where(np.isfinite(rows), differs, 0.0)  # Says nothing.
    at = int(np.argmax(differs))
    return (float(rows[at]), float(halves[at])) if differs[at] > 1 else None


def _is_sum(rows: float, halves: float) -> bool:
    return math.isclose(2 * halves, rows, rel_tol=1e-3)


def _cause(rows: float, halves: float) -> str:
    if _is_sum(rows, halves):
        return "It looks like a sum over the rows."
    return (
        "It looks like a mean over unequal weights (a mask, padding), or like "
        "examples that are coupled (in-batch negatives, numbers of the batch)."
    )


def _of_metric(name: str, rows: float, halves: float) -> str:
    remedy = (
        f"If it is a count or a sum, return jaxpar.Sum({name})."
        if _is_sum(rows, halves)
        else "Return jaxpar.Weighted(total, weight) for a mean over unequal weights, "
        "jaxpar.Max(x) for a maximum; a function of a mean, such as exp(loss), take of "
        "the mean that the step returns."
    )
    return (
        f"loss_fn: metric {name!r} is not a mean over the rows that it is given: of "
        f"some rows of a data shard it is {rows:.6g}, of their halves {halves:.6g} on "
        f"average. The step returns the mean over shards and micro-batches. {remedy}"
    )


def compared(
    forward: Callable[..., Sums],
    inputs: Inputs,
    accumulate: int,
    neighbour: Callable[[jax.Array], jax.Array],
) -> dict[str, jax.Array]:
    """Compare rows with their halves, on one data shard.

    Args:
      forward: ``(inputs, parts) -> Sums``, over so many micro-batches.
      inputs: this shard's.
      accumulate: micro-batches of a step.
      neighbour: gives another shard's leaf.

    Returns:
      By name: [2, 1], the rows' number and the halves'.

    Raises:
      ValueError: if the loss function fails on fewer rows than the engine gives it.
    """
    rows = checked_rows(inputs, accumulate, neighbour)
    if num_rows(rows) * accumulate == num_rows(inputs):
        one, two = forward(rows, 1), _of_fewer(forward, rows, 2)
    else:
        one, two = _of_fewer(forward, rows, 1), _of_fewer(forward, rows, 2)
    return {
        name: jnp.stack([result(value), result(other)])[:, None]
        for (name, value), other in zip(
            _named(one).items(), _named(two).values(), strict=True
        )
        if isinstance(value, Weighted)
    }


def _of_fewer(forward: Callable[..., Sums], rows: Inputs, parts: int) -> Sums:
    try:
        return forward(rows, parts)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "loss_fn: it can't be compared with itself on half of the rows, for it "
            "fails on them (see above). Write no number of rows into it, or pass "
            "check_loss=False."
        ) from error


def _named(sums: Sums) -> dict[str, Any]:
    return {"loss": sums.loss, **sums.metrics}


def checked_rows(
    inputs: Inputs, accumulate: int, neighbour: Callable[[jax.Array], jax.Array]
) -> Inputs:
    """As many rows as a micro-batch has on a shard, but even; two where that is one."""
    count = num_rows(inputs)
    own = count // accumulate
    if own >= 2:
        return map_rows(lambda x: x[::accumulate][: own - own % 2], inputs)
    if count >= 2:
        return map_rows(lambda x: x[:2], inputs)
    return map_rows(lambda x: jnp.concatenate([x, neighbour(x)]), inputs)


def next_shard(x: jax.Array) -> jax.Array:
    """The leaf of the next data shard, where data is manual."""
    size = jax.lax.axis_size(DATA)
    return jax.lax.ppermute(x, DATA, [(i, (i + 1) % size) for i in range(size)])


def with_noise(params: Params) -> Params:
    """Parameters in fp32, each leaf with seeded noise of a tenth of its size.

    A leaf's size is its root mean square, or that of an ordinary initialisation.
    """
    leaves, structure = jax.tree.flatten(params)

    def noisy(index: int, leaf: jax.Array) -> jax.Array:
        leaf = leaf.astype(jnp.float32)
        usual = leaf.shape[-2] ** -0.5 if leaf.ndim > 1 and leaf.size else 0.3
        size = jnp.maximum(jnp.sqrt(jnp.mean(leaf**2)), usual)
        return leaf + _NOISE * size * _hashed(index, leaf.shape)

    return jax.tree.unflatten(structure, [noisy(*x) for x in enumerate(leaves)])


def _hashed(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Numbers of variance one that differ from place to place.

    A hash of a few operations: XLA:CPU takes seconds to compile a normal draw a leaf.
    """
    word = jnp.full(shape, (seed + 1) * 0x9E3779B9 % 2**32, jnp.uint32)
    for dim in range(len(shape)):
        place = jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        word = (word ^ place) * jnp.uint32(0x85EBCA6B)
        word = word ^ (word >> 15)
    return (word >> 8).astype(jnp.float32) * (12**0.5 / 2**24) - 3**0.5


def why_not(
    draws: Sequence[Draw], rows: Inputs, *, coupled: bool, splits: int, asked: bool
) -> str | None:
    """Say why a loss is not checked; None where it is.

    Args:
      draws: of the loss function.
      rows: what a call of it is given.
      coupled: it is given whole micro-batches.
      splits: parts that a batch is given in: data shards times micro-batches.
      asked: ``check_loss``.
    """
    if not asked:
        return "check_loss=False"
    if isinstance(rows.batch, OnePack):
        return "it is given one pack at a time"
    if coupled:
        return "it couples examples, and is given whole micro-batches"
    if splits == 1:
        return "it is given the whole batch"
    if not can_be_constant(draws):
        return "it draws random numbers by rejection, which no constant can stand for"
    return None
