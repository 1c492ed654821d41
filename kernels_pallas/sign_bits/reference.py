"""The same in plain JAX.

Rows are reduced to bytes before chunks are transposed, and bytes transposed before they
become rows again: whole elements never change their order.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

ROWS = 8
"""Whose signs are in a byte."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """What one pass makes.

    Attributes:
      given: the sum of an array and its error, 0 where the mask is; [elements].
      bits: its signs, uint8; those of zeros and of padding are 1.
      squares: the sum of its squares.
    """

    given: Any
    bits: Any
    squares: Any


def pack(x: jax.Array, error: jax.Array, mask: jax.Array, *, columns: int) -> Packed:
    """See `kernels_pallas.sign_bits.pack`."""
    given = jnp.where(mask != 0, x + error, 0.0)
    padded = jnp.pad(given, (0, -given.size % (ROWS * columns)))
    rows = (padded >= 0).reshape(-1, ROWS, columns)
    bits = jnp.packbits(rows, axis=1, bitorder="little").reshape(-1)
    return Packed(given, bits, jnp.sum(jnp.square(given)))


def pack_mean(
    bits: jax.Array,
    scales: jax.Array,
    error: jax.Array,
    mask: jax.Array,
    *,
    columns: int,
) -> Packed:
    """See `kernels_pallas.sign_bits.pack_mean`."""
    numbers = unpack(bits, scales[:, None], columns=columns)
    return pack(numbers.mean(0)[: error.size], error, mask, columns=columns)


def unpack(bits: jax.Array, scales: jax.Array, *, columns: int) -> jax.Array:
    """See `kernels_pallas.sign_bits.unpack`."""
    before = bits.shape[:-1]
    rows = bits.reshape(*before, -1, 1, columns)
    of_row = jnp.left_shift(jnp.uint8(1), jnp.arange(ROWS, dtype=jnp.uint8))
    is_positive = (rows & of_row[:, None]) != 0
    wide = scales[..., None, None, :]
    return jnp.where(is_positive, wide, -wide).reshape(*before, -1)
