"""What are block patterns made of: windows, global blocks, random blocks."""

from collections.abc import Iterator, Sequence

import numpy as np


def sliding_window(size: int, num_blocks: int) -> np.ndarray:
    """Make the blocks [Q, K] of a window of `size` blocks around each query's own.

    Raises:
      ValueError: if it reaches beyond the sequence from each of its blocks.
    """
    if size // 2 >= num_blocks:
        raise ValueError(
            f"num_sliding_window_blocks={size}: reaches {size // 2} blocks to each "
            f"side, but the sequence has only {num_blocks}; it must be at most "
            f"{2 * num_blocks - 1}, which covers all of them."
        )
    rows, columns = np.indices((num_blocks, num_blocks), np.int32)
    return abs(rows - columns) <= size // 2


def add_global(blocks: np.ndarray, first: int, end: int, *, sees_all: bool) -> None:
    """Let all queries see the blocks from `first` to `end`, and those see all."""
    blocks[:, first:end] = True
    if sees_all:
        blocks[first:end] = True


def random_blocks(
    count: int, num_blocks: int, *, seed: Sequence[int], is_causal: bool
) -> np.ndarray:
    """Draw `count` key blocks for each query block, or all if it has fewer.

    The stream of Philox is the same in every version of NumPy.

    Args:
      count: blocks to draw.
      num_blocks: of the sequence.
      seed: two numbers.
      is_causal: draw no block after the query's own.

    Returns:
      The blocks [Q, K].

    Raises:
      ValueError: if the sequence has fewer blocks than are to be drawn.
    """
    if not 0 <= count <= num_blocks:
        raise ValueError(
            f"num_random_blocks={count}: must be from 0 to the {num_blocks} blocks of "
            "the sequence."
        )
    blocks = np.zeros((num_blocks, num_blocks), bool)
    bits = np.random.Philox(key=list(seed))
    for row in range(num_blocks if count else 0):
        visible = row + 1 if is_causal else num_blocks
        drawn = bits.random_raw(num_blocks)[:visible]
        blocks[row, np.argsort(drawn, kind="stable")[:count]] = True
    return blocks


def global_ranges(
    first: Sequence[int], ends: Sequence[int] | None, num_blocks: int
) -> Iterator[tuple[int, int]]:
    """Pair the start and the end of each range of global blocks.

    Raises:
      ValueError: if one exceeds the sequence.
    """
    ends = ends or tuple(i + 1 for i in first)
    for start, end in zip(first, ends, strict=True):
        if end > num_blocks:
            raise ValueError(
                f"global_block_indices: blocks {start} to {end - 1} are named, but the "
                f"sequence has only blocks 0 to {num_blocks - 1}."
            )
        yield start, end


def check_attention(attention: str, *, horizontal: bool = False) -> None:
    """Reject an unknown direction, and one that global blocks contradict."""
    if attention not in ("unidirectional", "bidirectional"):
        raise ValueError(
            f"attention={attention!r}: must be 'unidirectional' or 'bidirectional'."
        )
    if horizontal and attention == "unidirectional":
        raise ValueError(
            "horizontal_global_attention=True: global blocks would see the future; "
            "set attention='bidirectional', or omit it."
        )


def check_positive(**values: int) -> None:
    """Refuse numbers below 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be 1 or more.")


def check_window(size: int) -> None:
    """Reject a window without a middle."""
    if size < 1 or size % 2 == 0:
        raise ValueError(
            f"num_sliding_window_blocks={size}: must be odd, the query's own block and "
            "equally many on both sides; DeepSpeed treats an even number as the next "
            f"odd one, here {size + 1}."
        )


def as_tuple(pattern: object, *fields: str) -> None:
    """Convert list fields of a frozen pattern to tuples, so that it is hashable."""
    for field in fields:
        value = getattr(pattern, field)
        if value is not None:
            object.__setattr__(pattern, field, tuple(value))


def check_global(first: Sequence[int], ends: Sequence[int] | None) -> None:
    """Reject empty ranges of global blocks."""
    if any(i < 0 for i in first):
        raise ValueError(f"global_block_indices={first}: must be 0 or more.")
    if ends is None:
        return
    if len(ends) != len(first) or any(a >= b for a, b in zip(first, ends, strict=True)):
        raise ValueError(
            f"global_block_end_indices={ends}: must hold, for each of "
            f"global_block_indices={first}, a number above it."
        )
