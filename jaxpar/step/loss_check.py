"""Is the loss what the engine takes it for: a mean over the rows that it is given?

The engine gives a loss function a shard's rows of a micro-batch, and averages. That is
the loss of the global batch only if the loss of some rows is the mean of the losses of
their halves. So it is compared, of rows of every data shard with as many of another
one, before steps 1, 2, 4, 8 and so on (padding may first appear late): in fp32 where
that takes no more room, with the same random numbers for a row in both, and on
parameters with small noise, for behind a head of zeros all rows have the same loss.

Values are compared, not gradients: what is less than a ten-thousandth of the loss, or
has no value (a surrogate, which is always zero), is not seen.
"""

import dataclasses
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpar.jaxprs.draws import Draw
from jaxpar.mesh import DATA, are_present
from jaxpar.step.inputs import Inputs, OnePack, map_rows, num_rows
from jaxpar.step.loss import Sums
from jaxpar.step.row_draws import SIZE_ERRORS, can_be_of_parts
from jaxpar.step.state import TrainState
from jaxpar.step.weighted import Weighted, result
from jaxpar.types import Batch, Params

TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2
"""Relative to the largest number of a shard; the second for bf16 and fp16."""

_NOISES, _FLOOR = (0.1, -0.1, 0.0), 1e-6
"""Noise relative to a leaf's size, one after another where the one before says too
little; and the least difference of losses that counts (terms that cancel to nothing,
as on-policy ratios of 1 do, leave their rounding)."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Numbers of the data shard where they differ most.

    Attributes:
      rows: of the rows.
      halves: on average of their halves.
      is_sum: whether on every shard the first is twice the second.
    """

    rows: float
    halves: float
    is_sum: bool


@runtime_checkable
class Queue(Protocol):
    """Programs that may still run: a `jaxpar.engine.run_ahead.RunAhead`."""

    def finish_before_others(self) -> None:
        """Wait for them where another program's collectives would meet theirs."""
        ...


class NoCheck:
    """Checks nothing."""

    def before_call(
        self, state: Callable[[], TrainState], batch: Batch, queue: Queue
    ) -> None:
        """As of `LossCheck`."""


class LossCheck(NoCheck):
    """Compares when it is due; keeps what was warned of.

    Args:
      argument: "loss_fn" or "eval_fn".
      compare: ``(params, model_state, batch, step, key, noise) -> {name: [2, data]}``:
        of each number the one of the rows and of their halves, by data shard,
        replicated.
      whole: as `compare`, but ``{name: [2]}``: the number of the engine and of the
        whole batch; None where that may not fit.
      tolerance: relative.
    """

    def __init__(
        self,
        argument: str,
        compare: Callable[..., Mapping[str, jax.Array]],
        whole: Callable[..., Mapping[str, jax.Array]] | None,
        tolerance: float,
    ):
        self._compare, self._whole, self._tolerance = compare, whole, tolerance
        self._argument, self._calls, self._warned = argument, 0, set()

    def before_call(
        self, state: Callable[[], TrainState], batch: Batch, queue: Queue
    ) -> None:
        """Compare before calls 1, 2, 4, 8 and so on; waits for the devices.

        Args:
          state: gives what is kept of the state; asked only when a call is checked.
          batch: the call's, on the mesh.
          queue: programs that were dispatched before.

        Raises:
          ValueError: if the loss differs, or fails on half of the rows; nothing has
            changed then.

        Warns:
          UserWarning: if a metric does, once for each.
        """
        if (self._calls + 1) & self._calls:
            self._calls += 1
            return
        queue.finish_before_others()
        kept = state()
        given = (kept.params, kept.model_state, batch, kept.step, kept.key)
        wrong, noise = self._wrong(given)
        if "loss" in wrong:
            raise ValueError(self._refusal(wrong["loss"], (*given, noise)))
        self._calls += 1  # A loss that was refused is not waved through next.
        for name in sorted(wrong.keys() - self._warned):
            self._warned.add(name)
            text = _of_metric(self._argument, name, wrong[name])
            warnings.warn(text, stacklevel=3)

    def _wrong(self, given: tuple) -> tuple[dict[str, Difference], float]:
        """By name, the numbers that differ, and do so with another noise; the noise.

        One that is near zero by cancellation differs by rounding, and noise may give
        NaN (of the logarithm of a parameter).
        """
        wrong: dict[str, Difference] = {}
        names: Collection[str] | None = None
        last = 0.0
        for noise in _NOISES:
            found = jax.device_get(self._compare(*given, noise))
            if not np.isfinite(found["loss"][0]).any():
                continue
            pairs = {name: _difference(found[name], self._tolerance) for name in found}
            now = {name: pair for name, pair in pairs.items() if pair is not None}
            wrong = {k: v for k, v in now.items() if names is None or k in names}
            last = noise
            if names is not None or not wrong:
                break
            names = wrong.keys()
        return wrong, last

    def _refusal(self, found: Difference, given: tuple) -> str:
        shown = ""
        if self._whole is not None:
            engine, whole = jax.device_get(self._whole(*given)["loss"])
            shown = (
                f" Of the whole batch it is {whole:.6g}, and what the engine would "
                f"train on is {engine:.6g}."
            )
        return (
            f"{self._argument}: the loss is not a mean over the rows that it is given: "
            f"of rows of two data shards or micro-batches together it is "
            f"{found.rows:.6g}, but {found.halves:.6g} on average of each alone."
            f"{shown} {_cause(found)} "
            "Return a mean over the rows (.mean()); for masked or padded rows "
            "jaxpar.Weighted(total, weight) of two sums; for a loss that couples "
            "examples pass coupled_batch=True. check_loss=False turns this check off."
        )


def _difference(numbers: np.ndarray, tolerance: float) -> Difference | None:
    """Where the rows' number and the halves' differ most, if they do."""
    rows, halves = numbers
    sound = np.isfinite(rows)  # Else they say nothing.
    both = numbers[:, sound & np.isfinite(halves)]
    allowed = tolerance * np.abs(both).max(initial=0.0) + _FLOOR
    with np.errstate(invalid="ignore"):
        off = np.where(np.isfinite(halves), np.abs(rows - halves), np.inf)
    off = np.where(sound, off, 0.0)
    at = int(np.argmax(off))
    if off[at] <= allowed:
        return None
    is_sum = both.size > 0 and np.allclose(2 * both[1], both[0], rtol=1e-3)
    return Difference(float(rows[at]), float(halves[at]), bool(is_sum))


def _cause(found: Difference) -> str:
    if found.is_sum:
        return "It looks like a sum over the rows (or half of them have no weight)."
    return (
        "It looks like a mean over unequal weights (a mask, padding), or like "
        "examples that are coupled (in-batch negatives, numbers of the batch)."
    )


def _of_metric(argument: str, name: str, found: Difference) -> str:
    remedy = (
        f"If it is a count or a sum, return jaxpar.Sum({name})."
        if found.is_sum
        else "Return jaxpar.Weighted(total, weight) for a mean over unequal weights, "
        "jaxpar.Max(x) for a maximum; a function of a mean, such as exp(loss), take of "
        "the mean that the step returns."
    )
    return (
        f"{argument}: metric {name!r} is not a mean over the rows that it is given: of "
        f"rows of two data shards or micro-batches together it is {found.rows:.6g}, "
        f"but {found.halves:.6g} on average of each alone. The step returns the mean "
        f"over shards and micro-batches. {remedy}"
    )


def compared(
    forward: Callable[[Inputs, int], Sums],
    inputs: Inputs,
    accumulate: int,
    neighbour: Callable[[jax.Array], jax.Array],
) -> dict[str, jax.Array]:
    """Compare rows with their halves, on one data shard.

    Args:
      forward: ``(inputs, parts) -> Sums``, over so many micro-batches.
      inputs: this shard's.
      accumulate: micro-batches of a step.
      neighbour: gives another shard's leaf; this one's own where there is no other.

    Returns:
      By name: [2, 1], the rows' number and the halves'.

    Raises:
      ValueError: if the loss function fails on fewer rows than the engine gives it.
    """
    rows = mixed_rows(inputs, accumulate, neighbour)
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
    except SIZE_ERRORS as error:
        raise ValueError(
            "loss: it can't be compared with itself on half of the rows, for it "
            "fails on them (see above). Write no number of rows into it, or pass "
            "check_loss=False."
        ) from error


def _named(sums: Sums) -> dict[str, Any]:
    return {"loss": sums.loss, **sums.metrics}


def mixed_rows(
    inputs: Inputs, accumulate: int, neighbour: Callable[[jax.Array], jax.Array]
) -> Inputs:
    """Rows of this shard's first micro-batch, and another shard's of its second.

    One after the other in turn, so that each of two micro-batches has those of one; as
    many as a micro-batch has on a shard, but even, and two where that is one.
    """
    half = max(1, num_rows(inputs) // accumulate // 2)

    def mixed(x: jax.Array) -> jax.Array:
        own = x[::accumulate][:half]
        other = neighbour(x[1 % accumulate :: accumulate][:half])
        return jnp.stack([own, other], 1).reshape(2 * half, *x.shape[1:])

    return map_rows(mixed, inputs)


def another_shard(x: jax.Array) -> jax.Array:
    """The leaf of the data shard half a round away, where data is manual."""
    size = jax.lax.axis_size(DATA)
    pairs = [(i, (i + size // 2) % size) for i in range(size)]
    return jax.lax.ppermute(x, DATA, pairs)


def with_noise(params: Params, amount: jax.Array) -> Params:
    """Parameters in fp32, each leaf with seeded noise.

    Args:
      params: a tree of arrays.
      amount: the noise's deviation, relative to a leaf's size: its root mean square, or
        that of an ordinary initialisation.
    """
    leaves, structure = jax.tree.flatten(params)

    def noisy(index: int, leaf: jax.Array) -> jax.Array:
        leaf = leaf.astype(jnp.float32)
        usual = leaf.shape[-2] ** -0.5 if leaf.ndim > 1 and leaf.size else 0.3
        size = jnp.maximum(jnp.sqrt(jnp.mean(leaf**2)), usual)
        return leaf + amount * size * _hashed(index, leaf.shape)

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
    draws: Sequence[Draw],
    rows: Inputs,
    mesh: Mesh,
    *,
    coupled: bool,
    splits: int,
    asked: bool,
) -> str | None:
    """Say why a loss is not checked; None where it is.

    Args:
      draws: of the loss function.
      rows: what a call of it is given.
      mesh: the mesh.
      coupled: it is given whole micro-batches.
      splits: parts that a batch is given in: data shards times micro-batches.
      asked: ``check_loss``.
    """
    if not asked:
        return "check_loss=False"
    if not are_present(mesh):
        return "the mesh's devices are only to compile for"
    if isinstance(rows.batch, OnePack):
        return "it is given one pack at a time"
    if coupled:
        return "it couples examples, and is given whole micro-batches"
    if splits == 1:
        return "it is given the whole batch"
    if not can_be_of_parts(draws):
        return "it draws random numbers by rejection or inside a custom derivative"
    return None
