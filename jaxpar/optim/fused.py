"""Optimizers that step on flat buckets, in one pass over memory.

Each equals an optax transformation, and its logical state is that one's, name by name:
checkpoints move between the two. What is kept from step to step are buckets (see
`jaxpar.optim.buckets`) of fp32 masters, of moments in fp32 or 8 bits, and of the copies
in the compute dtype, which the pass makes.
"""

import dataclasses
import math
import numbers
import warnings
from collections.abc import Callable
from typing import Any

import optax

from kernels_pallas.fused_optimizers import AdamW, Lion, Rule

Schedule = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class FusedOptimizer:
    """An optimizer for buckets; made by `fused_adamw`, `fused_lamb` or `fused_lion`.

    `jaxpar.initialize` steps on its buckets. Inside another transformation (chain,
    masked, MultiSteps) it is the one that it equals, with a warning; in 8 bits it is
    refused there.

    Attributes:
      rule: what is done to an element.
      learning_rate: a number, or a schedule of the steps taken.
      weight_decay: a number.
      mask: which leaves decay, as optax takes it; None for all.
      bits: of each element of a moment, 32 or 8.
      equal: the optax transformation.
    """

    rule: Rule
    learning_rate: float | Schedule
    weight_decay: float
    mask: Any
    bits: int
    equal: optax.GradientTransformation

    @property
    def init(self) -> Callable[..., Any]:
        """The transformation's: the logical state."""
        return self.equal.init

    def update(self, *args: Any, **options: Any) -> Any:
        """The transformation's, leaf by leaf: not what `jaxpar.initialize` calls.

        Raises:
          ValueError: if moments are to be in 8 bits.

        Warns:
          UserWarning: always, for it is not what was asked for.
        """
        told = (
            "a fused optimizer inside another transformation steps leaf by leaf, with "
            "moments in fp32"
        )
        remedy = (
            "hand it to jaxpar.initialize itself, which clips (clip_norm) and "
            "accumulates (accumulate), or take optax's own"
        )
        if self.bits == 8:
            raise ValueError(f"bits=8: {told}; {remedy}.")
        warnings.warn(f"{told}; {remedy}.", UserWarning, stacklevel=2)
        return self.equal.update(*args, **options)


def fused_adamw(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    weight_decay: float = 1e-4,
    mask: Any = None,
    bits: int = 32,
) -> FusedOptimizer:
    """Make an AdamW that steps on flat buckets; equals `optax.adamw`.

    Whether it is faster than optax depends on the model: XLA already makes one kernel
    a leaf of optax's, at the least bytes. This one launches a kernel for all, and
    moves gradients into buckets first.

    Args:
      learning_rate: a number, or a schedule of the steps taken.
      b1: of the mean of gradients.
      b2: of the mean of their squares.
      eps: added to the root; positive.
      eps_root: added below it.
      weight_decay: times the parameter, it is added to the direction; a number.
      mask: which leaves decay: a tree of booleans, or a function of the parameters
        that gives one; None for all.
      bits: of each element of a moment: 32, or 8 (dynamic codes, scaled by tiles of
        1024 elements). A checkpoint has moments in fp32 always.

    Returns:
      An optimizer for `jaxpar.initialize`.

    Raises:
      ValueError: if a number is out of its range.
      TypeError: if what must be a number is none.

    Example:
      >>> fused_adamw(1e-3, bits=8).rule
      AdamW(b1=0.9, b2=0.999, eps=1e-08, eps_root=0.0, trust_ratio=False)
    """
    equal = optax.adamw(
        learning_rate, b1, b2, eps, eps_root, weight_decay=weight_decay, mask=mask
    )
    rule = AdamW(b1, b2, eps, eps_root)
    return _made(rule, learning_rate, weight_decay, mask, bits, equal)


def fused_lamb(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    eps_root: float = 0.0,
    *,
    weight_decay: float = 0.0,
    mask: Any = None,
    bits: int = 32,
) -> FusedOptimizer:
    """Make a LAMB that steps on flat buckets, in two passes; equals `optax.lamb`.

    Arguments, result and errors are those of `fused_adamw`.
    """
    equal = optax.lamb(learning_rate, b1, b2, eps, eps_root, weight_decay, mask)
    rule = AdamW(b1, b2, eps, eps_root, trust_ratio=True)
    return _made(rule, learning_rate, weight_decay, mask, bits, equal)


def fused_lion(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.99,
    *,
    weight_decay: float = 1e-3,
    mask: Any = None,
    bits: int = 32,
) -> FusedOptimizer:
    """Make a Lion that steps on flat buckets; equals `optax.lion`.

    Arguments, result and errors are those of `fused_adamw`, but that b1 is of the mean
    whose sign is taken, and b2 of the mean that is kept.

    A leaf that the loss does not depend on, such as the bias of an attention's keys,
    has rounding for a gradient. A sign makes full steps of it, so such a leaf differs
    between meshes, and from one device; the loss does not.
    """
    equal = optax.lion(learning_rate, b1, b2, weight_decay=weight_decay, mask=mask)
    return _made(Lion(b1, b2), learning_rate, weight_decay, mask, bits, equal)


def _made(
    rule: Rule,
    learning_rate: float | Schedule,
    weight_decay: float,
    mask: Any,
    bits: int,
    equal: optax.GradientTransformation,
) -> FusedOptimizer:
    if bits not in (8, 32):
        raise ValueError(
            f"bits={bits!r} must be 32 (moments in fp32) or 8 (dynamic codes)."
        )
    if not isinstance(weight_decay, numbers.Real):
        raise TypeError(
            f"weight_decay={weight_decay!r} must be a number; for a schedule take "
            "optax's optimizer."
        )
    if not 0 <= float(weight_decay) < math.inf:
        raise ValueError(f"weight_decay={weight_decay!r} must be at least 0.")
    if not callable(learning_rate) and not isinstance(learning_rate, numbers.Real):
        raise TypeError(
            f"learning_rate={learning_rate!r} must be a number, or a schedule: a "
            "function of the steps taken."
        )
    return FusedOptimizer(rule, learning_rate, weight_decay, mask, bits, equal)
