"""What is a loss function to the engine: called by name, its result seen as sums."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.model.bridge import Network
from jaxpar.sharding.collectives import Collectives
from jaxpar.sharding.constrain import constrain, own_constraints
from jaxpar.step.inputs import (
    Inputs,
    KeyedPacks,
    OnePack,
    map_rows,
    num_rows,
    twice_the_rows,
    unwrapped,
)
from jaxpar.step.row_draws import Draws, Rows
from jaxpar.step.state import cast_model_state
from jaxpar.step.weighted import (
    Max,
    Reduced,
    Weighted,
    as_reduced,
    as_weighted,
    is_reduced,
    merged,
    of_no_examples,
    result,
)
from jaxpar.types import LossFn, Metrics, PyTree

OWN_METRICS = frozenset(
    {"loss", "weight", "grad_norm", "skipped", "loss_scale", "learning_rate"}
)
"""Names that a loss function's own metrics must leave free."""

_BY_NAME = frozenset({"key", "step", "training"})
"""What a loss function may take besides the model and the batch."""

_OWN_KEY = 0x10550000
"""Folded into a micro-batch's key for the loss function's; models fold small ones."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """What one step adds up besides gradients.

    Attributes:
      loss: the loss's total and weight.
      metrics: the user's metrics, each with how it is combined.
    """

    loss: Any
    metrics: dict[str, Any]

    def results(self) -> Metrics:
        """The numbers of all examples."""
        named = {"loss": self.loss, **self.metrics}
        return {name: result(value) for name, value in named.items()}

    def over_data(self, collectives: Collectives) -> "Sums":
        """Combine the data shards' numbers."""

        def combine(value: Reduced) -> Reduced:
            over = collectives.largest if isinstance(value, Max) else collectives.total
            return jax.tree.map(over, value)

        return jax.tree.map(combine, self, is_leaf=is_reduced)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A user's loss function, given what it asks for.

    Attributes:
      fn: ``(model, batch, ...) -> loss`` or ``(loss, metrics)``.
      takes: what it takes of key, step and training.
    """

    fn: LossFn
    takes: frozenset[str]

    def __call__(
        self, model: Any, inputs: Inputs, *, key: jax.Array, training: bool
    ) -> Any:
        """Call it on a micro-batch, with a key that no part of the model draws from."""
        by_name = {
            "key": jax.random.fold_in(key, _OWN_KEY) if "key" in self.takes else None,
            "step": inputs.step.value,
            "training": training,
        }
        given = {name: by_name[name] for name in self.takes}
        with own_constraints():
            return self.fn(model, unwrapped(inputs.batch), **given)

    def on_sample(self, model: Any, inputs: Inputs) -> Any:
        """Call it where only its shapes, or its calls of the model, matter."""
        return self(model, inputs, key=jax.random.key(0), training=True)


def as_losses(loss_fn: LossFn, eval_fn: LossFn | None) -> tuple[Loss, Loss]:
    """See what the loss functions of training and of evaluation take.

    Raises:
      TypeError: if one is not callable, or takes anything besides a model, a batch and
        what `Loss` has by name that has no default.
    """
    loss = _as_loss(loss_fn, "loss_fn")
    return loss, _as_loss(eval_fn, "eval_fn") if eval_fn else loss


def _as_loss(fn: LossFn, argument: str) -> Loss:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # A builtin without a signature.
        return Loss(fn, frozenset())
    except TypeError:
        raise TypeError(
            f"{argument}={fn!r} must be a function (model, batch) -> loss."
        ) from None
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    others = [
        p
        for place, p in enumerate(parameters)
        if p.kind not in variable and (place >= 2 or p.kind is p.KEYWORD_ONLY)
    ]
    named = {p.name for p in others if p.kind is not p.POSITIONAL_ONLY}
    taken = (named & _BY_NAME) - bound.keys()
    unknown = [p.name for p in others if p.name not in taken and p.default is p.empty]
    if unknown:
        raise TypeError(
            f"{argument}: it takes {', '.join(unknown)} besides (model, batch); it may "
            "take key, step and training by these names. Put other values in the batch "
            "(jaxpar.Replicated(x) where they are not rows), or bind them by "
            "functools.partial."
        )
    return Loss(fn, frozenset(taken))


def make_loss(
    network: Network, loss: Loss, structure: Any, draws: Draws, *, training: bool
) -> Callable[..., tuple[Sums, PyTree]]:
    """Make ``(leaves, model_state, shard_key, inputs) -> (Sums, model_state)``."""

    def loss_of(key, leaves, model_state, inputs):
        def fn(model: Any, inputs: Inputs) -> Any:
            return loss(model, inputs, key=key, training=training)

        variables = (jax.tree.unflatten(structure, leaves), model_state)
        out, after = network.run(fn, variables, key, inputs, training=training)
        if training:
            model_state = cast_model_state(after, model_state)
        return loss_sums(out, inputs), model_state

    def redrawn(leaves, model_state, shard_key, inputs):
        def twice() -> tuple:
            return leaves, model_state, twice_the_rows(inputs)

        if isinstance(inputs.batch, KeyedPacks):
            call = functools.partial(loss_of, leaves=leaves)
            return over_packs(call, model_state, shard_key.key, inputs)
        rows = Rows(num_rows(inputs), twice)
        return draws.call(loss_of, shard_key, (leaves, model_state, inputs), rows)

    return redrawn


def over_packs(
    call: Callable[..., tuple[Sums, PyTree]],
    model_state: PyTree,
    key: jax.Array,
    inputs: Inputs,
) -> tuple[Sums, PyTree]:
    """Call a loss function with one pack after another.

    Args:
      call: ``(key, model_state=, inputs=) -> (Sums, model_state)``.
      model_state: before the first pack.
      key: any key of the kind that the packs' own are.
      inputs: packs with their keys.

    Returns:
      The sums, and the state after the last pack.
    """
    # Where data is automatic every device runs all packs; stated, for else each turn
    # of the loop fetches its pack from the shard that has it.
    batch = map_rows(constrain, inputs.batch)

    def one(index: jax.Array, state: PyTree) -> tuple[Sums, PyTree]:
        own = map_rows(
            lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, False), batch
        )
        given = dataclasses.replace(inputs, batch=OnePack(own.packs))
        own_key = jax.random.wrap_key_data(own.keys, impl=jax.random.key_impl(key))
        return call(own_key, model_state=state, inputs=given)

    def add(carry: tuple, index: jax.Array) -> tuple[tuple, None]:
        sums, state = carry
        new, state = one(index, state)
        return (merged(sums, new), state), None

    like, _ = jax.eval_shape(one, jnp.int32(0), model_state)
    start = of_no_examples(like), model_state
    return jax.lax.scan(add, start, jnp.arange(num_rows(inputs)))[0]


def loss_sums(out: Any, inputs: Inputs) -> Sums:
    """See what a loss function returned for some rows as sums and their weights.

    Raises:
      ValueError: if it is not a floating loss, or (loss, metrics), of scalars.
    """
    value, metrics = _loss_and_metrics(out)
    rows = num_rows(inputs)
    sums = Sums(
        as_weighted(value, "loss", rows),
        {name: as_reduced(x, name, rows) for name, x in metrics.items()},
    )
    _check_floating(value)
    return sums


def _check_floating(loss: Any) -> None:
    """Refuse a loss whose gradient would silently be zero."""
    dtype = jnp.result_type(loss.total if isinstance(loss, Weighted) else loss)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"loss_fn: the loss is {dtype}, which has no gradient; it must be "
            "floating. Return a mean of differentiable terms."
        )


def _loss_and_metrics(out: Any) -> tuple[Any, Mapping[str, Any]]:
    """Separate ``loss`` from ``(loss, metrics)``."""
    if not isinstance(out, tuple):
        return out, {}
    if len(out) != 2 or not isinstance(out[1], Mapping):
        kinds = ", ".join(map(_kind, out))
        raise ValueError(
            f"loss_fn: it returned a tuple of ({kinds}), but must return a loss, or "
            "(loss, metrics) with metrics a dict of scalars by name. Logits and other "
            "arrays are not returned; make scalars of them in loss_fn, or call "
            "engine.model() on a batch."
        )
    taken = sorted(OWN_METRICS & out[1].keys())
    if taken:
        raise ValueError(
            f"loss_fn: metrics {taken} are names of the engine's own metrics "
            f"({', '.join(sorted(OWN_METRICS))}); rename yours."
        )
    return out


def _kind(part: Any) -> str:
    shape = getattr(part, "shape", None)
    return type(part).__name__ if shape is None else f"{part.dtype}{list(shape)}"
