"""How does a moment fit into 8 bits an element: dynamic codes, scaled per tile.

An element is divided by the largest of its tile, and rounded to the nearest of a grid
that is linear within each power of 16: 2^E steps from 16^(E-1-top) to 16^(E-top), so
that large elements have the most bits and small ones are not lost. Code q of 2^E + j
stands for the end of the j-th step; 0 stands for 0, the largest code for 1.

Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2.
Differs: powers of 16 instead of 10, so that everything but the rounding is arithmetic
of exponents; the grid has 0 and both ends, so that decoded values get the same codes
again; no element but 0 becomes 0 in a second moment, which is stored as its root.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Code:
    """Elements between -1 and 1, or between 0 and 1, in a byte.

    Attributes:
      dtype: int8 for elements with a sign, uint8 for those without.
      top: the last power of 16; there are top + 1.
    """

    dtype: jnp.dtype
    top: int

    def encode(self, x: jax.Array) -> jax.Array:
        """Round to codes.

        Args:
          x: elements of at most 1, in fp32.

        Returns:
          Codes, of the same shape.
        """
        size = jnp.abs(x) if self.is_signed else x
        # The power below: 16^k with k from 4 bits of the exponent, rounded down.
        below = (_exponent(size) >> 2) + 1 + self.top
        power = jnp.clip(below, 0, self.top)
        lifted = size * _two_to(4 * (self.top - power))
        # 2^E + j, plus a half; never below 0, so that truncation rounds to the nearest.
        code = _two_to(power) * (lifted * (16 / 15) + 14 / 15) - 0.5
        code = code.astype(jnp.int32)
        if self.is_signed:
            code = jnp.where(x < 0, -code, code)
        else:
            code = jnp.where(size > 0, jnp.maximum(code, 1), 0)
        return code.astype(self.dtype)

    def decode(self, codes: jax.Array) -> jax.Array:
        """Undo `encode`, up to rounding; fp32."""
        given = codes.astype(jnp.int32).astype(jnp.float32)
        q = jnp.abs(given) if self.is_signed else given
        power = _exponent(q)
        steps = (q + 1) * _two_to(-power)
        value = _two_to(4 * (power - self.top)) * (15 / 16 * steps - 14 / 16)
        value = jnp.where(q > 0, value, 0.0)
        return jnp.where(given < 0, -value, value) if self.is_signed else value

    @property
    def is_signed(self) -> bool:
        """Whether elements may be negative."""
        return self.dtype == jnp.int8


def _exponent(x: jax.Array) -> jax.Array:
    """The largest power of 2 that is not above a non-negative number; int32."""
    return (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) - 127


def _two_to(power: jax.Array) -> jax.Array:
    """2 to an integer power in fp32's range; not checked."""
    return jax.lax.bitcast_convert_type((power + 127) << 23, jnp.float32)


SIGNED = Code(jnp.dtype(jnp.int8), 6)
ROOTS = Code(jnp.dtype(jnp.uint8), 7)
