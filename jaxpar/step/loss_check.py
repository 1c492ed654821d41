"""Is the loss a mean over its rows, as the engine assumes?

The engine calls a loss function with one shard's rows of a micro-batch, and averages.
The average equals the loss of the global batch only if the loss of some rows is the
mean of the losses of their halves. The check compares the two before steps 1, 2, 4, 8
and so on (padding may first appear late), on rows of every data shard mixed with as
many rows of another shard. It computes in fp32 where that needs no more memory, with
the same random numbers for a row in both, and adds small noise to the parameters,
because with a zero-initialised head all rows have the same loss.

It compares values, not gradients: it does not see a term below a ten-thousandth of the
loss, or one whose value is always zero (a surrogate).
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
from jaxpar.mesh import PIPE, are_present, batch_axes
from jaxpar.progress import waiting
from jaxpar.step.inputs import Inputs, OnePack, map_rows, num_rows
from jaxpar.step.loss import Sums
from jaxpar.step.row_draws import SIZE_ERRORS, can_be_of_parts
from jaxpar.step.state import TrainState
from jaxpar.step.weighted import Weighted, result
from jaxpar.types import Batch, Params

TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2
"""Relative to the largest value of a shard; the second is for bf16 and fp16."""

_NOISES, _FLOOR = (0.1, -0.1, 0.0), 1e-6
"""Noise relative to a leaf's magnitude, each tried if the one before is inconclusive;
and the smallest difference of losses that counts (terms that cancel, such as on-policy
ratios of 1, leave rounding errors)."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The values on the data shard where they differ most.

    Attributes:
      rows: the value for the rows.
      halves: the average of the values for their halves.
      is_sum: whether `rows` is twice `halves` on every shard.
    """

    rows: float
    halves: float
    is_sum: bool


@runtime_checkable
class Queue(Protocol):
    """Programs that may still run: a `jaxpar.engine.run_ahead.RunAhead`."""

    def finish_before_others(self) -> None:
        """Wait for them where another program's collectives could mix with theirs."""
        ...


class NoCheck:
    """Checks nothing."""

    def before_call(
        self, state: Callable[[], TrainState], batch: Batch, queue: Queue
    ) -> None:
        """See `LossCheck`."""


class LossCheck(NoCheck):
    """Compares when a check is due, and warns once for each metric.

    Args:
      argument: "loss_fn" or "eval_fn".
      compare: ``(weights, model_state, batch, step, key, noise) -> {name: [2, data]}``:
        the value for the rows and for their halves, by data shard, replicated.
      whole: as `compare`, but ``{name: [2]}``: the engine's value and that of the full
        batch; None where the full batch may not fit in memory.
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
          state: returns the packed state; called only when a check is due.
          batch: the call's batch, on the mesh.
          queue: programs that were dispatched before.

        Raises:
          ValueError: if the loss differs, or fails on half of the rows; the state is
            unchanged.

        Warns:
          UserWarning: if a metric differs, once for each metric.
        """
        if (self._calls + 1) & self._calls:
            self._calls += 1
            return
        queue.finish_before_others()
        kept = state()
        given = (kept.weights, kept.model_state, batch, kept.step, kept.key)
        shown = jax.process_index() == 0
        with waiting(f"checking that {self._argument} is a mean", shown=shown):
            wrong, noise = self._wrong(given)
        if "loss" in wrong:
            raise ValueError(self._refusal(wrong["loss"], (*given, noise)))
        self._calls += 1  # Not before: a rejected loss is checked again.
        for name in sorted(wrong.keys() - self._warned):
            self._warned.add(name)
            text = _of_metric(self._argument, name, wrong[name])
            warnings.warn(text, stacklevel=3)

    def _wrong(self, given: tuple) -> tuple[dict[str, Difference], float]:
        """The values that differ with two noises, by name; and the last noise.

        A value near zero by cancellation differs by rounding, and noise may give NaN
        (the logarithm of a parameter).
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
                f" The loss of the full batch is {whole:.6g}, but the engine would "
                f"train on {engine:.6g}."
            )
        return (
            f"{self._argument}: the loss is not a mean over the rows of its batch: on "
            f"rows of two data shards or micro-batches together it is "
            f"{found.rows:.6g}, but its average over the two is {found.halves:.6g}."
            f"{shown} {_cause(found)} "
            "Return a mean over the rows (.mean()); for masked or padded rows return "
            "jaxpar.Weighted(total, weight) of two sums; for a loss that couples "
            "examples pass coupled_batch=True. check_loss=False turns this check off."
        )


def _difference(numbers: np.ndarray, tolerance: float) -> Difference | None:
    """Where the values for rows and halves differ most; None if they agree."""
    rows, halves = numbers
    sound = np.isfinite(rows)  # The others are not comparable.
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
        "It looks like a mean over unequal weights (a mask, padding), or a loss that "
        "couples examples (in-batch negatives, batch statistics)."
    )


def _of_metric(argument: str, name: str, found: Difference) -> str:
    remedy = (
        f"If it is a count or a sum, return jaxpar.Sum({name})."
        if found.is_sum
        else "Return jaxpar.Weighted(total, weight) for a mean over unequal weights, "
        "jaxpar.Max(x) for a maximum. Compute a function of a mean, such as exp(loss), "
        "from the mean that the step returns."
    )
    return (
        f"{argument}: metric {name!r} is not a mean over the rows of its batch: on "
        f"rows of two data shards or micro-batches together it is {found.rows:.6g}, "
        f"but its average over the two is {found.halves:.6g}. The step returns the "
        f"mean over shards and micro-batches. {remedy}"
    )


def compared(
    forward: Callable[[Inputs, int], Sums],
    inputs: Inputs,
    accumulate: int,
    neighbour: Callable[[jax.Array], jax.Array],
) -> dict[str, jax.Array]:
    """Compare rows with their halves, on one data shard.

    Args:
      forward: ``(inputs, parts) -> Sums``, over `parts` micro-batches.
      inputs: this shard's inputs.
      accumulate: micro-batches a step.
      neighbour: returns another shard's leaf; without one this shard's, or where it is
        computed in halves, that with its halves exchanged.

    Returns:
      name -> [2, 1]: the value for the rows, and for their halves.

    Raises:
      ValueError: if the loss function fails on half of the rows.
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
            "loss: the check that it is a mean calls it on half of the rows, where it "
            "fails (see above). Don't hard-code the number of rows in it, or pass "
            "check_loss=False."
        ) from error


def _named(sums: Sums) -> dict[str, Any]:
    return {"loss": sums.loss, **sums.metrics}


def mixed_rows(
    inputs: Inputs, accumulate: int, neighbour: Callable[[jax.Array], jax.Array]
) -> Inputs:
    """Interleave this shard's first micro-batch with another shard's second.

    Split into two micro-batches, each then has the rows of one shard. As many rows as a
    micro-batch has on a shard, rounded down to an even number, at least two.
    """
    half = max(1, num_rows(inputs) // accumulate // 2)

    def mixed(x: jax.Array) -> jax.Array:
        own = x[::accumulate][:half]
        other = neighbour(x[1 % accumulate :: accumulate])[:half]
        return jnp.stack([own, other], 1).reshape(2 * half, *x.shape[1:])

    return map_rows(mixed, inputs)


def another_shard(x: jax.Array) -> jax.Array:
    """The leaf of the shard half the shards away, where the batch axes are manual."""
    axes = batch_axes(jax.sharding.get_abstract_mesh())
    size = jax.lax.axis_size(axes)
    pairs = [(i, (i + size // 2) % size) for i in range(size)]
    return jax.lax.ppermute(x, axes, pairs)


def other_half(x: jax.Array) -> jax.Array:
    """The leaf, its second half of rows first."""
    return jnp.roll(x, x.shape[0] // 2, axis=0)


def with_noise(params: Params, amount: jax.Array) -> Params:
    """Parameters in fp32, each leaf with seeded noise.

    Args:
      params: a tree of arrays. Those of which only a layer at a time is on the device
        stay as they are: what is in host memory, and numbers of layers.
      amount: the noise's standard deviation, relative to the larger of the leaf's root
        mean square and that of a usual initialisation.
    """
    leaves, structure = jax.tree.flatten(params)

    def noisy(index: int, leaf: jax.Array) -> jax.Array:
        is_on_host = jax.typeof(leaf).memory_space == jax.memory.Space.Host
        if is_on_host or leaf.dtype == jnp.int32:
            return leaf
        leaf = leaf.astype(jnp.float32)
        usual = leaf.shape[-2] ** -0.5 if leaf.ndim > 1 and leaf.size else 0.3
        size = jnp.maximum(jnp.sqrt(jnp.mean(leaf**2)), usual)
        return leaf + amount * size * _hashed(index, leaf.shape)

    return jax.tree.unflatten(structure, [noisy(*x) for x in enumerate(leaves)])


def _hashed(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Pseudo-random numbers of variance one, from a hash of the position.

    A cheap hash, because XLA:CPU takes seconds to compile one normal draw a leaf.
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
    averages: bool = False,
) -> str | None:
    """The reason why a loss is not checked; None if it is.

    Args:
      draws: the loss function's random draws.
      rows: shapes of the inputs of one call.
      mesh: the mesh.
      coupled: whether it sees full micro-batches.
      splits: calls a batch: data shards times micro-batches.
      asked: ``check_loss``.
      averages: whether it calls `jaxpar.batch_mean`.
    """
    if not asked:
        return "check_loss=False"
    if not are_present(mesh):
        return "the mesh's devices are compile-only"
    if isinstance(rows.batch, OnePack):
        return "it is called with one pack at a time"
    if coupled:
        return "it couples examples and sees full micro-batches"
    if splits == 1:
        return "it sees the full batch"
    if averages and mesh.shape[PIPE] > 1:
        return "it calls batch_mean in a pipeline, where halves have no common mean"
    if not can_be_of_parts(draws):
        return "it draws random numbers by rejection or inside a custom derivative"
    return None
