"""Which sparse attention patterns are there: DeepSpeed's, with its names.

Each matches one of DeepSpeed's ``SparsityConfig`` classes, with the same defaults. A
pattern gives its blocks of the past and of the future; `make_layout` removes the
future if attention is unidirectional.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxpar.sparse_attention.blocks import (
    add_global,
    as_tuple,
    check_attention,
    check_global,
    check_positive,
    check_window,
    global_ranges,
    random_blocks,
    sliding_window,
)

GLOBAL = ("global_block_indices", "global_block_end_indices")


@dataclasses.dataclass(frozen=True)
class Dense:
    """Every block: the baseline of the others.

    Attributes:
      num_heads: attention heads.
      block: tokens along each side of a block.
      attention: unidirectional, or bidirectional.
    """

    num_heads: int
    block: int = 16
    attention: str = "bidirectional"

    def __post_init__(self) -> None:
        check_positive(num_heads=self.num_heads, block=self.block)
        check_attention(self.attention)

    def heads_alike(self) -> bool:
        """Whether all heads have the same blocks: yes."""
        return True

    def blocks_of(self, head: int, num_blocks: int) -> np.ndarray:
        """Compute one head's blocks [Q, K]."""
        del head
        return np.ones((num_blocks, num_blocks), bool)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Adjacent windows; the last blocks of each window are seen by all.

    Attributes:
      num_heads: attention heads.
      block: tokens along each side of a block.
      different_layout_per_head: let heads alternate between global blocks.
      num_local_blocks: blocks of a window.
      num_global_blocks: blocks of a window that are seen by all; divides the former.
      attention: unidirectional, or bidirectional.
      horizontal_global_attention: global blocks see all others, too; bidirectional.
      num_different_global_patterns: number of alternatives, each num_global_blocks
        further from a window's end.

    Raises:
      ValueError: for an invalid value.

    Source: Child et al., "Generating Long Sequences with Sparse Transformers" (2019),
      as DeepSpeed's ``FixedSparsityConfig``.
    """

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False
    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        check_positive(num_heads=self.num_heads, block=self.block)
        horizontal = self.horizontal_global_attention
        check_attention(self.attention, horizontal=horizontal)
        local, seen = self.num_local_blocks, self.num_global_blocks
        check_positive(num_local_blocks=local, num_global_blocks=seen)
        if local % seen:
            raise ValueError(
                f"num_global_blocks={seen}: must divide num_local_blocks={local}."
            )
        patterns = self.num_different_global_patterns
        if not 1 <= patterns <= local // seen:
            raise ValueError(
                f"num_different_global_patterns={patterns}: must be from 1 to "
                f"num_local_blocks / num_global_blocks = {local // seen}."
            )
        if patterns > 1 and not self.different_layout_per_head:
            raise ValueError(
                f"num_different_global_patterns={patterns}: heads alternate; "
                "set different_layout_per_head=True, or leave it at 1."
            )

    def heads_alike(self) -> bool:
        """Whether all heads have the same blocks."""
        return self.num_different_global_patterns == 1

    def blocks_of(self, head: int, num_blocks: int) -> np.ndarray:
        """Compute one head's blocks [Q, K]."""
        blocks = np.zeros((num_blocks, num_blocks), bool)
        local, seen = self.num_local_blocks, self.num_global_blocks
        for start in range(0, num_blocks, local):
            blocks[start : start + local, start : start + local] = True
        first = local - (1 + head % self.num_different_global_patterns) * seen
        whole = num_blocks - num_blocks % local
        starts = list(range(first, whole, local))
        if whole < num_blocks:  # the last window is short: as far into it as it goes
            starts.append(max(0, min(whole + first, num_blocks - seen)))
        for start in starts:
            add_global(
                blocks, start, start + seen, sees_all=self.horizontal_global_attention
            )
        return blocks


@dataclasses.dataclass(frozen=True)
class Variable:
    """Adjacent windows of any sizes, chosen global blocks, and random ones.

    Attributes:
      num_heads: attention heads.
      block: tokens along each side of a block.
      different_layout_per_head: draw random blocks for each head.
      num_random_blocks: random blocks of keys for each block of queries.
      local_window_blocks: blocks of the first windows; the last is repeated.
      global_block_indices: blocks that are seen by all, or the first of each range.
      global_block_end_indices: the exclusive end of each range; None for single
        blocks.
      attention: unidirectional, or bidirectional.
      horizontal_global_attention: global blocks see all others, too; bidirectional.
      seed: of random blocks.

    Raises:
      ValueError: for an invalid value.

    Source: DeepSpeed's ``VariableSparsityConfig``.
    """

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False
    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(num_heads=self.num_heads, block=self.block)
        horizontal = self.horizontal_global_attention
        check_attention(self.attention, horizontal=horizontal)
        as_tuple(self, "local_window_blocks", *GLOBAL)
        if not self.local_window_blocks or min(self.local_window_blocks) < 1:
            raise ValueError(
                f"local_window_blocks={self.local_window_blocks}: must have a "
                "window or more, each of at least 1 block."
            )
        check_global(self.global_block_indices, self.global_block_end_indices)

    def heads_alike(self) -> bool:
        """Whether all heads have the same blocks."""
        return not (self.different_layout_per_head and self.num_random_blocks)

    def blocks_of(self, head: int, num_blocks: int) -> np.ndarray:
        """Compute one head's blocks [Q, K]."""
        blocks = random_blocks(
            self.num_random_blocks,
            num_blocks,
            seed=(self.seed, head),
            is_causal=self.attention == "unidirectional",
        )
        start = 0
        sizes = iter(self.local_window_blocks)
        while start < num_blocks:
            size = next(sizes, self.local_window_blocks[-1])
            blocks[start : start + size, start : start + size] = True
            start += size
        indices, ends = self.global_block_indices, self.global_block_end_indices
        for first, end in global_ranges(indices, ends, num_blocks):
            add_global(blocks, first, end, sees_all=self.horizontal_global_attention)
        return blocks


@dataclasses.dataclass(frozen=True)
class BigBird:
    """A sliding window, the first blocks global both ways, and random blocks.

    Attributes:
      num_heads: attention heads.
      block: tokens along each side of a block.
      different_layout_per_head: draw random blocks for each head.
      num_random_blocks: random blocks of keys for each block of queries.
      num_sliding_window_blocks: blocks of a window, an odd number: equally many before
        and after the query's own.
      num_global_blocks: blocks at the start that see all and are seen by all.
      attention: unidirectional, or bidirectional.
      seed: of random blocks.

    Raises:
      ValueError: for an invalid value.

    Source: Zaheer et al., "Big Bird: Transformers for Longer Sequences" (2020), as
      DeepSpeed's ``BigBirdSparsityConfig``.
    """

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False
    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(num_heads=self.num_heads, block=self.block)
        check_attention(self.attention)
        check_window(self.num_sliding_window_blocks)
        check_positive(num_global_blocks=self.num_global_blocks)

    def heads_alike(self) -> bool:
        """Whether all heads have the same blocks."""
        return not (self.different_layout_per_head and self.num_random_blocks)

    def blocks_of(self, head: int, num_blocks: int) -> np.ndarray:
        """Compute one head's blocks [Q, K]."""
        if self.num_global_blocks > num_blocks:
            raise ValueError(
                f"num_global_blocks={self.num_global_blocks}: the sequence has only "
                f"{num_blocks} blocks of {self.block}."
            )
        blocks = random_blocks(
            self.num_random_blocks,
            num_blocks,
            seed=(self.seed, head),
            is_causal=self.attention == "unidirectional",
        )
        blocks |= sliding_window(self.num_sliding_window_blocks, num_blocks)
        add_global(blocks, 0, self.num_global_blocks, sees_all=True)
        return blocks


@dataclasses.dataclass(frozen=True)
class BSLongformer:
    """A sliding window, and chosen blocks that are global both ways.

    Attributes:
      num_heads: attention heads.
      block: tokens along each side of a block.
      num_sliding_window_blocks: blocks of a window, an odd number.
      global_block_indices: blocks that see all and are seen by all, or the first of
        each range of them.
      global_block_end_indices: the exclusive end of each range; None for single
        blocks.
      attention: unidirectional, or bidirectional.

    Raises:
      ValueError: for an invalid value.

    Source: Beltagy et al., "Longformer: The Long-Document Transformer" (2020), as
      DeepSpeed's ``BSLongformerSparsityConfig``.
    """

    num_heads: int
    block: int = 16
    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"

    def __post_init__(self) -> None:
        check_positive(num_heads=self.num_heads, block=self.block)
        check_attention(self.attention)
        check_window(self.num_sliding_window_blocks)
        as_tuple(self, *GLOBAL)
        check_global(self.global_block_indices, self.global_block_end_indices)

    def heads_alike(self) -> bool:
        """Whether all heads have the same blocks: yes."""
        return True

    def blocks_of(self, head: int, num_blocks: int) -> np.ndarray:
        """Compute one head's blocks [Q, K]."""
        del head
        blocks = sliding_window(self.num_sliding_window_blocks, num_blocks)
        indices, ends = self.global_block_indices, self.global_block_end_indices
        for first, end in global_ranges(indices, ends, num_blocks):
            add_global(blocks, first, end, sees_all=True)
        return blocks


@dataclasses.dataclass(frozen=True)
class LocalSlidingWindow:
    """A window that slides with the query.

    Attributes:
      num_heads: attention heads.
      block: tokens along each side of a block.
      num_sliding_window_blocks: blocks of a window, an odd number: equally many before
        and, if attention is bidirectional, after the query's own.
      attention: unidirectional, or bidirectional.

    Raises:
      ValueError: for an invalid value.

    Source: DeepSpeed's ``LocalSlidingWindowSparsityConfig``.
    """

    num_heads: int
    block: int = 16
    num_sliding_window_blocks: int = 3
    attention: str = "unidirectional"

    def __post_init__(self) -> None:
        check_positive(num_heads=self.num_heads, block=self.block)
        check_attention(self.attention)
        check_window(self.num_sliding_window_blocks)

    def heads_alike(self) -> bool:
        """Whether all heads have the same blocks: yes."""
        return True

    def blocks_of(self, head: int, num_blocks: int) -> np.ndarray:
        """Compute one head's blocks [Q, K]."""
        del head
        return sliding_window(self.num_sliding_window_blocks, num_blocks)
