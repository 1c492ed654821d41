"""Which blocks of a sequence does a pattern make active: DeepSpeed's, corrected.

With unidirectional attention no active block is in the future; the future tokens of a
diagonal block are masked by the tile work, which is made causal.

Differs: DeepSpeed's fixed and variable patterns have blocks in the future (all global
blocks of a window but the first; random ones), it attends to the future inside
diagonal blocks unless another mask is given, its dense pattern has no direction, its
random blocks follow Python's global seed, and it silently drops indices beyond the
sequence. It rejects a window of more blocks than the sequence has, though half of it
may fit; here half of it must.
"""

import functools
from typing import Protocol, runtime_checkable

import numpy as np

from kernels_pallas.block_sparse_attention import BlockLayout


@runtime_checkable
class SparsityPattern(Protocol):
    """The interface of all patterns."""

    @property
    def num_heads(self) -> int:
        """Attention heads."""
        ...

    @property
    def block(self) -> int:
        """Tokens along each side of a block."""
        ...

    @property
    def attention(self) -> str:
        """Unidirectional, or bidirectional: a query sees later tokens."""
        ...

    def heads_alike(self) -> bool:
        """Whether all heads have the same blocks."""
        ...

    def blocks_of(self, head: int, num_blocks: int) -> np.ndarray:
        """Compute one head's blocks [Q, K], of the past and of the future."""
        ...


@functools.lru_cache(maxsize=64)
def make_layout(pattern: SparsityPattern, seq_len: int) -> BlockLayout:
    """Compute the active blocks of a sequence.

    Args:
      pattern: one of `jaxpar.sparse_attention`'s, or any hashable object with the same
        interface.
      seq_len: tokens, a multiple of the pattern's block.

    Returns:
      The block layout for the pattern's heads; the same object for the same arguments.

    Raises:
      ValueError: if the block does not divide the sequence, or the pattern names
        blocks beyond the sequence, or has a window beyond it.

    Example:
      >>> from jaxpar.sparse_attention import LocalSlidingWindow
      >>> layout = make_layout(LocalSlidingWindow(num_heads=2), 64)
      >>> layout.blocks[0].astype(int)
      array([[1, 0, 0, 0],
             [1, 1, 0, 0],
             [0, 1, 1, 0],
             [0, 0, 1, 1]])
    """
    num_blocks, rest = divmod(seq_len, pattern.block)
    if rest or num_blocks < 1:
        above = (num_blocks + 1) * pattern.block
        raise ValueError(
            f"seq_len={seq_len}: not a multiple of block={pattern.block}; pad the "
            f"sequence to {above} tokens, or choose a block that divides it."
        )
    distinct = 1 if pattern.heads_alike() else pattern.num_heads
    heads = [pattern.blocks_of(head, num_blocks) for head in range(distinct)]
    blocks_NQK = np.stack(heads)
    if pattern.attention == "unidirectional":
        blocks_NQK &= np.tri(num_blocks, dtype=bool)
    shape = (pattern.num_heads, num_blocks, num_blocks)
    return BlockLayout(np.broadcast_to(blocks_NQK, shape), pattern.block)


@functools.lru_cache(maxsize=64)
def first_blocks(layout: BlockLayout, num_blocks: int) -> BlockLayout:
    """Take a layout's first blocks, for the beginning of its sequence.

    Args:
      layout: the layout.
      num_blocks: of queries and of keys, at most those of the layout.

    Returns:
      The layout of these blocks; the same object for the same arguments.

    Example:
      >>> first_blocks(BlockLayout(np.tri(4, dtype=bool), block=16), 2).blocks.shape
      (1, 2, 2)
    """
    if layout.blocks.shape[1:] == (num_blocks, num_blocks):
        return layout
    return BlockLayout(layout.blocks[:, :num_blocks, :num_blocks], layout.block)
