"""What does one training step do: the function that is compiled.

Gradients (`jaxpar.step.gradients`), then in automatic mode: unscale, norm, clip, the
optimizer, and one global decision whether the step is applied. A technique changes the
functions called here, not this file.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.sharding.memory_kinds import to_device
from jaxpar.step.carried import Carried, Stepped
from jaxpar.step.inputs import make_inputs
from jaxpar.step.loss import Sums
from jaxpar.step.reduction import clip_factor
from jaxpar.step.reduction_part import PART
from jaxpar.step.state import TrainState
from jaxpar.step.update import Update
from jaxpar.types import Batch, Metrics, Params, PyTree

Pace = Callable[[Params, Params, jax.Array], Params]
"""``(params before, after, step) -> params after``, nearer to those before."""

UPDATE_SCOPE = "update"
"""The named scope of what follows the gradients."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reduced:
    """What a step has before its update: gradients, and what is known of them.

    Attributes:
      grads: reduced and packed; times the loss scale.
      norm: their global norm, without the scale.
      finite: whether it is finite.
      applied: whether the step is applied.
      skipped: whether it was to be applied, and is not.
      scale: the loss scale.
      factor: what the update multiplies the gradients by.
      model_state: the model's new state.
      results: the loss and the user's metrics.
      carry: what the reduction carries after it.
      late: where updates are a step late, what the last step's update gets in place of
        `grads`, `factor`, `applied` and the loss; None otherwise.
    """

    grads: PyTree
    norm: Any
    finite: Any
    applied: Any
    skipped: Any
    scale: Any
    factor: Any
    model_state: PyTree
    results: Any
    carry: PyTree
    late: "Reduced | None" = None

    @property
    def for_update(self) -> dict[str, Any]:
        """What `Update.apply` and `HostUpdate.on_host` get beside the gradients."""
        loss = self.results["loss"]
        return {"factor": self.factor, "applied": self.applied, "loss": loss}


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A pure training step ``(state, batch) -> (state, metrics)``, and its two halves.

    Attributes:
      gradients: ``(state, batch) -> Reduced``; the batch is a global one.
      update: ``(state, Reduced) -> (state, metrics)``.
      apply: ``(state, Reduced) -> state``: the optimizer's update alone, in no step.
    """

    gradients: Callable[[TrainState, Batch], Reduced]
    update: Callable[[TrainState, Reduced], tuple[TrainState, Metrics]]
    apply: Callable[[TrainState, Reduced], TrainState]

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take the step."""
        return self.update(state, self.gradients(state, batch))


def make_train_step(
    gradients: Callable[..., tuple[PyTree, Sums, PyTree, PyTree]],
    update: Update,
    carried: Sequence[Carried],
    *,
    clip_norm: float | None,
    scales_loss: bool,
    pace: Pace | None = None,
    took_batch: Callable[[Mapping[str, PyTree]], Any] = lambda carry: True,
) -> TrainStep:
    """Make the pure functions of a step.

    A step whose gradients are not finite, or whose loss has weight zero, changes only
    the counters. A norm that overflows fp32 counts as not finite.

    Args:
      gradients: as `jaxpar.step.gradients.make_gradients` returns it.
      update: the optimizer; the step takes and returns its packed state.
      carried: the parts of ``state.carried``, "loss_scale" among them.
      clip_norm: the largest global norm of the gradients; None for no clipping, or
        if the update's reduction clips itself.
      scales_loss: whether the loss is scaled dynamically.
      pace: slows an update down; None for not at all.
      took_batch: whether the gradients are of a batch, by what is carried to the step;
        one of an asynchronous schedule may end no batch.

    Returns:
      The step; its metrics are loss, grad_norm (before clipping), skipped (steps so
      far), loss_scale, learning_rate if the optimizer reports it, and the user's own.
    """

    def reduced(state: TrainState, batch: Batch) -> Reduced:
        key = jax.random.fold_in(state.key, state.step)
        scale = jnp.float32(1.0)
        if scales_loss:
            scale = state.carried["loss_scale"].scale
        # Another loss's update may store what this one does not train on the host.
        weights = update.local_params(state.params), to_device(state.frozen)
        inputs = make_inputs(batch, state.step)
        carry = {p.name: state.carried[p.name] for p in carried if p.in_gradients}
        takes = took_batch(carry)
        given = weights, state.model_state, inputs, key, scale, carry
        grads, sums, model_state, carry = gradients(*given)
        grads = update.pack_grads(grads)
        norm = update.reduction.carried_norm(carry.get(PART, ()))
        norm = update.norm(grads) / scale if norm is None else norm
        finite = jnp.isfinite(norm)
        applied = finite & (sums.loss.weight > 0) & takes
        skipped = takes & ~applied
        results = sums.results()
        most = None if update.reduction.clips_itself else clip_norm
        factor = clip_factor(norm, most) / scale
        known = norm, finite, applied, skipped, scale, factor
        return Reduced(grads, *known, model_state, results, carry)

    optimized = functools.partial(_optimized, update, pace)

    def applied(state: TrainState, own: Reduced) -> TrainState:
        params, opt_state, _ = optimized(state, own)
        return dataclasses.replace(state, params=params, opt_state=opt_state)

    def updated(state: TrainState, before: Reduced) -> tuple[TrainState, Metrics]:
        params, opt_state, reported = optimized(state, before.late or before)
        stepped = _stepped(update, state, before, params, opt_state)
        parts = {p.name: p.after(state.carried[p.name], stepped) for p in carried}
        new = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            model_state=optax.tree.where(
                before.applied, before.model_state, state.model_state
            ),
            opt_state=opt_state,
            carried=parts,
        )
        return new, before.results | _counters(before, parts) | reported

    scope = jax.named_scope(UPDATE_SCOPE)
    return TrainStep(reduced, scope(updated), scope(applied))


def _optimized(
    update: Update, pace: Pace | None, state: TrainState, own: Reduced
) -> tuple[PyTree, PyTree, Metrics]:
    """What the optimizer makes of a state: parameters, its own state, and metrics."""
    given = own.grads, state.params, state.opt_state
    params, opt_state, reported = update.apply(*given, **own.for_update)
    if pace is not None:
        before, _ = update.unpack(state.params, state.opt_state)
        after, unpacked = update.unpack(params, opt_state)
        params, _ = update.pack(pace(before, after, state.step), unpacked)
    return params, opt_state, reported


def _counters(own: Reduced, parts: Mapping[str, Any]) -> Metrics:
    skipped = parts["loss_scale"].skipped
    return {"grad_norm": own.norm, "skipped": skipped, "loss_scale": own.scale}


def _stepped(
    update: Update, state: TrainState, own: Reduced, params: PyTree, opt_state: PyTree
) -> Stepped:
    """What a step did, as its carried parts see it."""
    before, _ = update.unpack(state.params, state.opt_state)
    after, _ = update.unpack(params, opt_state)
    known = own.finite, own.applied, own.skipped, own.carry
    return Stepped(to_device(after), to_device(before), *known)
