"""Attention over the blocks of a sparse pattern, for models of any kind.

`SparseSelfAttention` is the layer for NNX models; Linen models, and others, call
`sparse_attention`.
"""

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxpar.models.shard_kernel import Split, on_pieces, split_of
from jaxpar.sparse_attention import SparsityPattern, make_layout
from jaxpar.sparse_attention.layouts import first_blocks
from kernels_pallas.backend import Choice
from kernels_pallas.block_sparse_attention import (
    TileWork,
    block_sparse_attention,
    make_tile_work,
)


def sparse_attention(
    query_BTNH: Float[Array, "B T N H"],
    key_BTKH: Float[Array, "B T K H"],
    value_BTKH: Float[Array, "B T K H"],
    pattern: SparsityPattern,
    *,
    pattern_len: int | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    kv_seq_lens_B: Int[Array, "B"] | None = None,
    implementation: Choice | None = None,
) -> Float[Array, "B T N H"]:
    """Attend to the active blocks of a pattern, on each device its rows and heads.

    Attention is causal if the pattern is unidirectional. A sequence that is not a
    multiple of the pattern's block is computed as if padded to it, with masked padding.

    Args:
      query_BTNH: queries.
      key_BTKH: keys; each head of them serves N / K heads of queries.
      value_BTKH: values.
      pattern: one of `jaxpar.sparse_attention`'s, of N heads.
      pattern_len: tokens for which the pattern's block layout is made; a shorter
        sequence uses its first blocks. None for the sequence's own length.
      segment_ids_BT: tokens attend only to tokens of their own segment; None where
        each row is one segment.
      kv_seq_lens_B: valid tokens of each row, the first ones; None for all.
      implementation: the name of one; None for the fastest that runs here.

    Returns:
      The weighted sums of values; 0 for a token that sees nothing.

    Raises:
      ValueError: if the pattern does not have N heads, or names blocks beyond the
        sequence.

    Example:
      >>> from jaxpar.sparse_attention import LocalSlidingWindow
      >>> x = jax.random.normal(jax.random.key(0), (1, 40, 2, 8))
      >>> sparse_attention(x, x, x, LocalSlidingWindow(num_heads=2, block=16)).shape
      (1, 40, 2, 8)

    Source: DeepSpeed's ``SparseSelfAttention``.
    """
    _, seq_len, num_heads, _ = query_BTNH.shape
    work = tile_work_of(pattern, seq_len, num_heads, pattern_len=pattern_len)
    split = split_of(query_BTNH, key_BTKH)

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segment_ids: jax.Array | None,
        lens: jax.Array | None,
    ) -> jax.Array:
        return block_sparse_attention(
            query,
            key,
            value,
            work,
            segment_ids=segment_ids,
            kv_seq_lens=lens,
            first_head=_first_head(split, query),
            implementation=implementation,
        )

    spec, of_rows = P(split.rows, None, split.heads), P(split.rows)
    ins = (spec, spec, spec, of_rows, of_rows)
    return on_pieces(attend, ins, spec, split)(
        query_BTNH, key_BTKH, value_BTKH, segment_ids_BT, kv_seq_lens_B
    )


def _first_head(split: Split, query_BTNH: jax.Array) -> jax.Array | None:
    """The number of the first head of one device."""
    if split.heads is None:
        return None
    return jax.lax.axis_index(split.heads) * query_BTNH.shape[2]


def tile_work_of(
    pattern: SparsityPattern,
    seq_len: int,
    num_heads: int,
    *,
    pattern_len: int | None = None,
) -> TileWork:
    """Lay out the tile work of a pattern's attention over a sequence of any length.

    Args:
      pattern: the pattern.
      seq_len: tokens, T.
      num_heads: of the queries.
      pattern_len: tokens for which the block layout is made, if more than T; None for
        T.

    Returns:
      The work; the same object for the same arguments.

    Raises:
      ValueError: if the pattern does not have that many heads, or names blocks beyond
        the sequence.
    """
    if pattern.num_heads != num_heads:
        raise ValueError(
            f"pattern: {type(pattern).__name__} has num_heads={pattern.num_heads}, but "
            f"there are {num_heads} heads of queries; give it the same number."
        )
    num_blocks = -(-seq_len // pattern.block)
    laid_out = max(num_blocks, -(-(pattern_len or 0) // pattern.block))
    layout = make_layout(pattern, laid_out * pattern.block)
    return make_tile_work(
        first_blocks(layout, num_blocks),
        seq_len,
        seq_len,
        causal=pattern.attention == "unidirectional",
    )


class SparseSelfAttention(nnx.Module):
    """The attention between the projections: it has no parameters of its own.

    Args:
      pattern: one of `jaxpar.sparse_attention`'s.
      implementation: the name of one; None for the fastest that runs here.

    Example:
      >>> from jaxpar.sparse_attention import BigBird
      >>> attention = SparseSelfAttention(BigBird(num_heads=2, block=16))
      >>> x = jax.random.normal(jax.random.key(0), (1, 64, 2, 8))
      >>> attention(x, x, x).shape
      (1, 64, 2, 8)
    """

    def __init__(
        self, pattern: SparsityPattern, *, implementation: Choice | None = None
    ):
        self.pattern = pattern
        self.implementation: Choice | None = implementation

    def __call__(
        self,
        query_BTNH: Float[Array, "B T N H"],
        key_BTKH: Float[Array, "B T K H"],
        value_BTKH: Float[Array, "B T K H"],
        *,
        segment_ids_BT: Int[Array, "B T"] | None = None,
        kv_seq_lens_B: Int[Array, "B"] | None = None,
    ) -> Float[Array, "B T N H"]:
        """Attend, as `sparse_attention` does.

        Args:
          query_BTNH: queries.
          key_BTKH: keys.
          value_BTKH: values.
          segment_ids_BT: segments; None where each row is one.
          kv_seq_lens_B: valid tokens of each row; None for all.

        Returns:
          The weighted sums of values.
        """
        return sparse_attention(
            query_BTNH,
            key_BTKH,
            value_BTKH,
            self.pattern,
            segment_ids_BT=segment_ids_BT,
            kv_seq_lens_B=kv_seq_lens_B,
            implementation=self.implementation,
        )
