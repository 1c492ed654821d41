"""Which optimizers update flat buckets in one pass over memory?

Each computes the same as an optax transformation and has the same logical state, so
checkpoints work for both. The packed state is buckets (see `jaxpar.optim.buckets`) of
fp32 masters, of moments in fp32 or 8 bits, and of copies in the compute dtype, which
the same pass writes.
"""

import math
import numbers
from typing import Any

import optax

from jaxpar.optim.fused_update import FusedOptimizer, Schedule
from kernels_pallas.fused_optimizers import AdamW, Lion, Rule


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
    """Make an AdamW that updates flat buckets; equals `optax.adamw`.

    Whether it is faster than optax depends on the model: XLA already fuses optax's
    update into one kernel a leaf with minimal memory traffic. This one launches one
    kernel a bucket, and copies gradients into buckets first.

    Args:
      learning_rate: a number, or a schedule of the steps taken.
      b1: decay rate of the mean of gradients.
      b2: decay rate of the mean of squared gradients.
      eps: added to the square root; positive.
      eps_root: added under the square root.
      weight_decay: a number; times the parameter it is added to the update.
      mask: which leaves decay: a tree of booleans, or a function of the parameters
        that returns one; None for all.
      bits: bits of each element of a moment: 32, or 8 (dynamic codes, scaled by tiles
        of 1024 elements). A checkpoint always has fp32 moments.

    Returns:
      An optimizer for `jaxpar.initialize`.

    Raises:
      ValueError: if a number is out of range.
      TypeError: if an argument must be a number and is not.

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
    """Make a LAMB that updates flat buckets in two passes; equals `optax.lamb`.

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
    """Make a Lion that updates flat buckets; equals `optax.lion`.

    Arguments, result and errors are those of `fused_adamw`, except that b1 is the decay
    rate of the mean whose sign is taken, and b2 that of the stored mean.

    The gradient of a leaf that does not affect the loss, such as the bias of attention
    keys, is rounding error. Its sign gives full steps, so such a leaf differs between
    meshes, and from one device; the loss does not.
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
            f"weight_decay={weight_decay!r} must be a number; for a schedule use "
            "the optax optimizer."
        )
    if not 0 <= float(weight_decay) < math.inf:
        raise ValueError(f"weight_decay={weight_decay!r} must be at least 0.")
    if not callable(learning_rate) and not isinstance(learning_rate, numbers.Real):
        raise TypeError(
            f"learning_rate={learning_rate!r} must be a number, or a schedule: a "
            "function of the steps taken."
        )
    return FusedOptimizer(rule, learning_rate, weight_decay, mask, bits, equal)
