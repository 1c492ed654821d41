"""What does one training step do: the function that is compiled.

Gradients (`jaxpar.step.gradients`), then in automatic mode: unscale, norm, clip, the
optimizer, and one global decision whether the step is applied. A technique changes the
functions called here, not this file.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from jaxpar.step.carried import Carried, Stepped
from jaxpar.step.inputs import make_inputs
from jaxpar.step.loss import Sums
from jaxpar.step.state import TrainState
from jaxpar.step.update import Update
from jaxpar.types import Batch, Metrics, PyTree

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
"""A training step; the batch is a global one."""


def make_train_step(
    gradients: Callable[..., tuple[PyTree, Sums, PyTree]],
    update: Update,
    carried: Sequence[Carried],
    *,
    clip_norm: float | None,
    scales_loss: bool,
) -> TrainStep:
    """Make the pure function ``(state, batch) -> (state, metrics)``.

    A step whose gradients are not finite, or whose loss has weight zero, changes only
    the counters. A norm that overflows fp32 counts as not finite.

    Args:
      gradients: as `jaxpar.step.gradients.make_gradients` returns it.
      update: the optimizer; the step takes and returns its packed state.
      carried: the parts of ``state.carried``, "loss_scale" among them.
      clip_norm: the largest global norm of the gradients; None for no clipping.
      scales_loss: whether the loss is scaled dynamically.

    Returns:
      The step; its metrics are loss, grad_norm (before clipping), skipped (steps so
      far), loss_scale, learning_rate if the optimizer reports it, and the user's own.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        scale = jnp.float32(1.0)
        if scales_loss:
            scale = state.carried["loss_scale"].scale
        params = update.compute_params(state.params)
        grads, sums, model_state = gradients(
            params, state.model_state, make_inputs(batch, state.step), key, scale
        )
        grads = update.pack_grads(grads)
        norm = _global_norm(grads) / scale
        finite = jnp.isfinite(norm)
        applied = finite & (sums.loss.weight > 0)
        results = sums.results()
        params, opt_state, reported = update.apply(
            grads,
            state.params,
            state.opt_state,
            factor=_clip_factor(norm, clip_norm) / scale,
            applied=applied,
            loss=results["loss"],
        )
        stepped = Stepped(update.unpack(params, opt_state)[0], finite, applied)
        parts = {p.name: p.after(state.carried[p.name], stepped) for p in carried}
        new = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            model_state=optax.tree.where(applied, model_state, state.model_state),
            opt_state=opt_state,
            carried=parts,
        )
        counters = {
            "grad_norm": norm,
            "skipped": parts["loss_scale"].skipped,
            "loss_scale": scale,
        }
        return new, results | counters | reported

    return step


def _global_norm(grads: PyTree) -> jax.Array:
    """The norm in fp32, for gradients of any dtype."""
    return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))


def _clip_factor(norm: jax.Array, clip_norm: float | None) -> jax.Array | float:
    if clip_norm is None:
        return 1.0
    return jnp.where(norm < clip_norm, 1.0, clip_norm / norm)
