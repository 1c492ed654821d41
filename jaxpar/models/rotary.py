"""Rotary positions: by which angles are queries and keys rotated?"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Rotation = tuple[Float[Array, "#B T half"], Float[Array, "#B T half"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How the wavelengths of a model are stretched, for rows longer than its first.

    Attributes:
      kind: "linear" divides all frequencies by `factor`; "llama3" divides those whose
        wavelength is above ``original_len / low``, keeps those below ``original_len /
        high``, and goes smoothly from one to the other between.
      factor: what frequencies are divided by.
      low: of "llama3".
      high: likewise, above `low`.
      original_len: tokens of the rows before, of "llama3".

    Raises:
      ValueError: if a number is out of range.

    Source: Grattafiori et al., "The Llama 3 Herd of Models" (2024), and the models'
    published code for the numbers.
    """

    kind: Literal["linear", "llama3"] = "llama3"
    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_len: int = 8192

    def __post_init__(self):
        if self.factor <= 0 or not 0 < self.low < self.high or self.original_len < 1:
            raise ValueError(
                f"RotaryScaling: factor={self.factor}, low={self.low}, "
                f"high={self.high}, original_len={self.original_len}: all must be "
                "above 0, and high above low."
            )

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """Frequencies, in radians a token, of the stretched wavelengths."""
        slow = frequencies / self.factor
        if self.kind == "linear":
            return slow
        turns = self.original_len * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return (1 - kept) * slow + kept * frequencies


def rotation_at(
    positions_BT: Int[Array, "B T"],
    head_size: int,
    base: float = 10_000.0,
    scaling: RotaryScaling | None = None,
) -> Rotation:
    """Compute the angles by which rotary embedding rotates each pair of features.

    Pair i of a head at position t rotates by ``t * base ** (-2 i / head_size)``.

    Args:
      positions_BT: position of each token; one row applies to a whole batch.
      head_size: features per head; even.
      base: of the geometric series of wavelengths.
      scaling: how wavelengths are stretched; None for not at all.

    Returns:
      Cosines and sines, fp32, [B, T, head_size / 2] each.

    Source: Su et al., "RoFormer" (2021), equation 15.
    """
    frequency = base ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    frequency = frequency if scaling is None else scaling.scaled(frequency)
    angle = positions_BT[..., None].astype(jnp.float32) * frequency.astype(np.float32)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTNH: Float[Array, "B T N H"], rotation: Rotation) -> jax.Array:
    """Rotate each pair of features by its angle, in fp32.

    Args:
      x_BTNH: queries or keys.
      rotation: the result of `rotation_at`.

    Returns:
      The same shape and dtype.

    Differs: feature i pairs with i + H/2, not with its neighbour, as in most
    published checkpoints; the two differ by a permutation of features.
    """
    cosine, sine = (part[:, :, None, :] for part in rotation)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
    return turned.astype(x_BTNH.dtype)
