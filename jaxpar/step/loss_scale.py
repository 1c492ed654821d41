"""How is the loss scaled so that fp16 gradients do not underflow?

The scale halves when gradients overflow and doubles after a window of steps without
overflow; a small hysteresis tolerates single overflows. The state exists at every
precision, unused where the loss is not scaled, so checkpoints have the same leaves and
a run in fp32 can continue in fp16.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; the trace is
that of DeepSpeed's dynamic loss scaler.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpar.step.carried import Carried, Stepped
from jaxpar.types import Leaf, Params

START, WINDOW, HYSTERESIS, MINIMUM = 2.0**16, 1000, 2, 1.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The scaler's state; every field a scalar array.

    Attributes:
      scale: the factor on the loss, where the loss is scaled.
      hysteresis: overflows left before the scale is halved, counting that one.
      iteration: steps seen.
      last_overflow: the iteration of the last overflow; -1 before any.
      skipped: steps skipped so far, for non-finite gradients or a zero weight.
      exhausted: whether gradients overflowed with the scale at its minimum.
    """

    scale: Leaf
    hysteresis: Leaf
    iteration: Leaf
    last_overflow: Leaf
    skipped: Leaf
    exhausted: Leaf


def init_loss_scale() -> LossScale:
    """The state before the first step."""
    return LossScale(
        scale=jnp.float32(START),
        hysteresis=jnp.int32(HYSTERESIS),
        iteration=jnp.int32(0),
        last_overflow=jnp.int32(-1),
        skipped=jnp.int32(0),
        exhausted=jnp.bool_(False),
    )


def update_loss_scale(
    state: LossScale, *, finite: jax.Array, skipped: jax.Array, scales_loss: bool
) -> LossScale:
    """The state after a step.

    Without overflow, and with k = iteration - last_overflow - 1 a positive multiple of
    the window, the scale doubles and the hysteresis is refilled. An overflow takes one
    from the hysteresis, or halves the scale when one is left.

    Args:
      state: the state before.
      finite: whether all gradients were finite; a boolean scalar.
      skipped: whether the step was to be applied and was not; a boolean scalar.
      scales_loss: whether the precision scales its loss.

    Returns:
      The new state; without loss scaling only `iteration` and `skipped` change.
    """
    counted = dataclasses.replace(
        state,
        iteration=state.iteration + 1,
        skipped=state.skipped + jnp.where(skipped, 1, 0),
    )
    if not scales_loss:
        return counted
    since = state.iteration - state.last_overflow - 1
    grows = finite & (since > 0) & (since % WINDOW == 0)
    halves = ~finite & (state.hysteresis == 1)
    halved = jnp.maximum(state.scale / 2, MINIMUM)
    grown = jnp.where(grows, state.scale * 2, state.scale)
    left = jnp.where(~finite & ~halves, state.hysteresis - 1, state.hysteresis)
    return dataclasses.replace(
        counted,
        scale=jnp.where(halves, halved, grown),
        hysteresis=jnp.where(grows, HYSTERESIS, left),
        last_overflow=jnp.where(finite, state.last_overflow, state.iteration),
        exhausted=state.exhausted | (halves & (state.scale <= MINIMUM)),
    )


@dataclasses.dataclass(frozen=True)
class LossScaler(Carried):
    """The loss scale as a part of the state (`jaxpar.step.carried.Carried`).

    Attributes:
      scales_loss: whether the precision scales its loss.
    """

    scales_loss: bool
    name: str = "loss_scale"

    def init(self, params: Params) -> LossScale:
        """The state before the first step."""
        del params
        return init_loss_scale()

    def after(self, part: LossScale, stepped: Stepped) -> LossScale:
        """The state after a step."""
        return update_loss_scale(
            part,
            finite=stepped.finite,
            skipped=stepped.skipped,
            scales_loss=self.scales_loss,
        )


def require_scale(exhausted: jax.Array) -> None:
    """Raise if gradients overflowed at the minimal scale; waits for the step.

    Args:
      exhausted: a step's `LossScale.exhausted`.

    Raises:
      FloatingPointError: if it is true.
    """
    if bool(exhausted):
        raise FloatingPointError(
            "loss scale: gradients overflowed with the scale at its minimum of 1, so "
            "fp16 cannot hold them. Lower the learning rate, look for non-finite "
            "inputs, or use precision='bf16'."
        )
