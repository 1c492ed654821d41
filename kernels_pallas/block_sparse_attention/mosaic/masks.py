"""Which scores of a tile are visible: computed in registers, if a tile needs it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.block_sparse_attention.tile_work import TileWork


@dataclasses.dataclass(frozen=True)
class Piece:
    """The scores that a warpgroup holds: a piece of a tile.

    Attributes:
      shape: of the scores.
      q_dim: the dim of queries, 0 or 1; the other dim is of keys.
      first_q: the first query, in the sequence.
      first_k: the first key, in the sequence.
      q_in_tile: the first query, in its tile; static or traced.
      k_in_tile: the first key, in its tile.
    """

    shape: tuple[int, int]
    q_dim: int
    first_q: Any
    first_k: Any
    q_in_tile: Any
    k_in_tile: Any

    def iota(self, dim: int) -> jax.Array:
        """Indices of the queries (`q_dim`) or keys within the piece."""
        return plgpu.broadcasted_iota(
            jnp.int32, self.shape, dim, layout=plgpu.Layout.WGMMA
        )


def visible(
    piece: Piece,
    work: TileWork,
    words_ref: Any,
    mask: Any,
    *,
    length: Any,
    segments: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Compute which scores are visible.

    Args:
      piece: their position.
      work: the work of the kernels.
      words_ref: [M, words], its masks.
      mask: the number of the tile's mask.
      length: valid keys of the sequence.
      segments: of the piece's queries and keys, each along its dim; None for one.

    Returns:
      Booleans of the piece's shape.
    """
    q, k = piece.iota(piece.q_dim), piece.iota(1 - piece.q_dim)
    shown = k + piece.first_k < length
    if work.causal:
        shown &= q + piece.first_q >= k + piece.first_k
    if work.masks.shape[0] > 1:
        shown &= _block_bits(piece, work, words_ref, mask, q, k) > 0
    if segments is not None:
        of_q = lax.broadcast_in_dim(segments[0], piece.shape, [piece.q_dim])
        of_k = lax.broadcast_in_dim(segments[1], piece.shape, [1 - piece.q_dim])
        shown &= of_q == of_k
    return shown


def _block_bits(
    piece: Piece, work: TileWork, words_ref: Any, mask: Any, q: jax.Array, k: jax.Array
) -> jax.Array:
    """1 where the block of a score is active; sizes are powers of two."""
    _, per_tile_q, per_tile_k = work.masks.shape
    block_q, block_k = work.tile.q // per_tile_q, work.tile.k // per_tile_k
    first = lax.div(piece.q_in_tile, jnp.int32(block_q))
    word = jnp.full(piece.shape, 0, jnp.int32)
    word = plgpu.layout_cast(word, plgpu.Layout.WGMMA) + words_ref[mask, first]
    for at in range(1, piece.shape[piece.q_dim] // block_q):
        word = jnp.where(q >= at * block_q, words_ref[mask, first + at], word)
    shift = lax.shift_right_logical(
        k + piece.k_in_tile, jnp.int32(block_k.bit_length() - 1)
    )
    return lax.shift_right_logical(word, shift) & 1
