"""How does the engine call a loss function and read its result as sums?"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import tree
from jaxpar.model.bridge import Network
from jaxpar.model.model_state import cast_model_state
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
from jaxpar.step.row_draws import BatchRows, Draws
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
"""Names of the engine's metrics; a loss function's metrics can't use them."""

_BY_NAME = frozenset({"key", "step", "training"})
"""Arguments that a loss function may take besides the model and the batch."""

_OWN_KEY = 0x10550000
"""Folded into a micro-batch's key for the loss function; models fold small numbers."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """What a step sums besides gradients.

    Attributes:
      loss: the loss's total and weight.
      metrics: the user's metrics, as `Weighted`, `Sum` or `Max`.
    """

    loss: Any
    metrics: dict[str, Any]

    def results(self) -> Metrics:
        """The final values, over all examples."""
        named = {"loss": self.loss, **self.metrics}
        return {name: result(value) for name, value in named.items()}

    def over_data(self, collectives: Collectives) -> "Sums":
        """Combine the values of all data shards."""

        def combine(value: Reduced) -> Reduced:
            over = collectives.largest if isinstance(value, Max) else collectives.total
            return jax.tree.map(over, value)

        return jax.tree.map(combine, self, is_leaf=is_reduced)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A user's loss function, and the optional arguments that it takes.

    Attributes:
      fn: ``(model, batch, ...) -> loss`` or ``(loss, metrics)``.
      takes: which of key, step and training it takes.
      name: among several losses; None for the only one.
    """

    fn: LossFn
    takes: frozenset[str]
    name: str | None = None

    def argument(self, *, training: bool) -> str:
        """How the user has passed it, for messages."""
        argument = "loss_fn" if training else "eval_fn"
        return argument if self.name is None else f"{argument}[{self.name!r}]"

    def __call__(
        self, model: Any, inputs: Inputs, *, key: jax.Array, training: bool
    ) -> Any:
        """Call it on a micro-batch, with a key that the model does not use."""
        by_name = {
            "key": jax.random.fold_in(key, _OWN_KEY) if "key" in self.takes else None,
            "step": inputs.step.value,
            "training": training,
        }
        given = {name: by_name[name] for name in self.takes}
        with own_constraints():
            return self.fn(model, unwrapped(inputs.batch), **given)

    def on_sample(self, model: Any, inputs: Inputs) -> Any:
        """Call it to trace its shapes or its calls of the model."""
        return self(model, inputs, key=jax.random.key(0), training=True)


def as_losses(
    loss_fn: LossFn, eval_fn: LossFn | None, name: str | None = None
) -> tuple[Loss, Loss]:
    """Read which optional arguments the loss functions take.

    Args:
      loss_fn: for training.
      eval_fn: for evaluation; None for `loss_fn`.
      name: of the loss among several.

    Raises:
      TypeError: if one is not callable, or has a required argument besides a model, a
        batch, and key, step and training by name.
    """
    loss = _as_loss(loss_fn, "loss_fn", name)
    return loss, _as_loss(eval_fn, "eval_fn", name) if eval_fn else loss


def _as_loss(fn: LossFn, argument: str, name: str | None) -> Loss:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # A builtin without a signature.
        return Loss(fn, frozenset(), name)
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
            "(jaxpar.Replicated(x) if they are not rows), or bind them with "
            "functools.partial."
        )
    return Loss(fn, frozenset(taken), name)


def make_loss(
    network: Network, loss: Loss, structure: Any, draws: Draws, *, training: bool
) -> Callable[..., tuple[Sums, PyTree]]:
    """Make ``(leaves, model_state, shard_key, inputs) -> (Sums, model_state)``.

    `structure` is that of `TrainState.weights`, whose unsharded leaves are given.
    """

    def loss_of(key, leaves, model_state, inputs):
        def fn(model: Any, inputs: Inputs) -> Any:
            return loss(model, inputs, key=key, training=training)

        params = tree.merged(*jax.tree.unflatten(structure, leaves))
        variables = (params, model_state)
        how = {"training": training, "step": inputs.step.value}
        out, after = network.run(fn, variables, key, inputs, **how)
        if training:
            model_state = cast_model_state(after, model_state)
        return loss_sums(out, inputs), model_state

    def redrawn(leaves, model_state, shard_key, inputs):
        def twice() -> tuple:
            return leaves, model_state, twice_the_rows(inputs)

        if isinstance(inputs.batch, KeyedPacks):
            call = functools.partial(loss_of, leaves=leaves)
            return over_packs(call, model_state, shard_key.key, inputs)
        rows = BatchRows(num_rows(inputs), twice)
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
      key: any key of the same kind as the packs' keys.
      inputs: packs with their keys.

    Returns:
      The sums, and the state after the last pack.
    """
    # Where data is automatic every device runs all packs. Without the constraint each
    # iteration fetches its pack from the shard that holds it.
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
    """Convert a loss function's result for some rows to sums and weights.

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
    """Raise for a loss whose gradient would silently be zero."""
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
            "arrays can't be returned; reduce them to scalars in loss_fn, or call "
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
