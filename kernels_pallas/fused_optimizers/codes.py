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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Code:
    """Elements between -1 and 1, or between 0 and 1, in a byte.

    Attributes:
      dtype: int8 for elements with a sign, uint8 for those without.
      top: the last power of 16; there are top + 1.
    """

    dtype: jnp.dtype
    top: int

    def encode(self, x: jax.Array, largest: Any = 1.0) -> jax.Array:
        """Round to codes.

        Args:
          x: elements, in fp32.
          largest: the largest of their sizes.

        Returns:
          Codes, of the same shape.
        """
        size = jnp.abs(x) if self.is_signed else x
        # Sizes from 16^k on have exponents of 4 (32 + k) and more when doubled: 32 + k
        # is what the bits from 25 on say. E is power - 31 + top.
        twice = size * (2.0 * _inverse(largest))
        bits = _bits(twice)
        power = bits >> 25
        # 2^E (16/15 lifted + 14/15), with lifted = 16^(top-E) size, is 2^E + j and a
        # half, which is cut off. Where E is below 0, so is all but less than 1 of it.
        slope = _float(_bits_of(16 / 15, self.top + 92) - power * (3 << 23))
        offset = _float(_bits_of(14 / 15, self.top - 31) + power * (1 << 23))
        code = twice * slope + offset - 0.5
        if self.is_signed:
            code = _float((_bits(code) & ~_SIGN) | (_bits(x) & _SIGN))
            return code.astype(jnp.int32).astype(self.dtype)
        least = jnp.minimum(bits, 1)  # 1, but of 0.
        return jnp.maximum(code.astype(jnp.int32), least).astype(self.dtype)

    def decode(self, codes: jax.Array, largest: Any = 1.0) -> jax.Array:
        """Undo `encode`, up to rounding; fp32."""
        q = codes.astype(jnp.int32).astype(jnp.float32)
        bits = _bits(q) & _EXPONENT
        # 2^E, and -2^(3E-2), where the product overflows into the sign; 0 for q = 0.
        power, cube = _float(bits), _float(3 * bits)
        # A value is 2^(3E-4top-4) (15 (|q| + 1) - 14 2^E), with q's sign: exact.
        unit = -(2.0 ** -(4 * self.top + 2))
        rest = 15 * unit - 14 * unit * power
        if self.is_signed:
            rest = _float(_bits(rest) ^ (_bits(q) & _SIGN))
        return (15 * unit * q + rest) * cube * largest

    @property
    def is_signed(self) -> bool:
        """Whether elements may be negative."""
        return self.dtype == jnp.int8


_SIGN, _EXPONENT = -(1 << 31), 255 << 23
"""The bits of a sign, and of an exponent, in fp32."""


def _inverse(x: Any) -> Any:
    """One over a largest size; of a tile of zeros, a finite number."""
    return 1.0 / jnp.maximum(x, 2.0**-126)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _bits_of(number: float, power: int) -> int:
    """The bits of a number times 2^power in fp32, beyond its range too."""
    return int(np.float32(number).view(np.int32)) + (power << 23)


SIGNED = Code(jnp.dtype(jnp.int8), 6)
ROOTS = Code(jnp.dtype(jnp.uint8), 7)
