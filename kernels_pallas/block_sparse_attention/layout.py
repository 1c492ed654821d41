"""Which blocks of keys may a block of queries see: an array of booleans."""

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class BlockLayout:
    """The blocks of attention's T x S matrix that are computed.

    Block layouts are compared by identity, so that one can be a static argument of a
    jitted function.

    Attributes:
      blocks: [N, Q, K] booleans, whether a block is active, by head, block of queries
        and block of keys; one head if all heads share it. [Q, K] means that too.
      block: tokens along each side of a block.

    Raises:
      ValueError: if the array has neither two nor three dims, or one is empty, or
        `block` is below 1.
      TypeError: if the array's entries are not booleans.

    Example:
      >>> layout = BlockLayout(np.tri(4, dtype=bool), block=16)
      >>> layout.blocks.shape, layout.fraction
      ((1, 4, 4), 0.625)
    """

    blocks: np.ndarray
    block: int

    def __post_init__(self) -> None:
        blocks = np.asarray(self.blocks)
        if blocks.dtype != np.bool_:
            raise TypeError(
                f"blocks: has dtype {blocks.dtype}, but a block is active or not; "
                "give booleans, as array.astype(bool)."
            )
        if blocks.ndim not in (2, 3) or blocks.size == 0:
            raise ValueError(
                f"blocks: has shape {blocks.shape}; it must be [N, Q, K] (heads, "
                "blocks of queries, blocks of keys), or [Q, K] for all heads."
            )
        if self.block < 1:
            raise ValueError(f"block={self.block}: must be 1 token or more.")
        blocks = blocks[None] if blocks.ndim == 2 else blocks
        object.__setattr__(self, "blocks", blocks)

    @property
    def num_heads(self) -> int:
        """Heads that it was made for; 1 if it is for any number."""
        return self.blocks.shape[0]

    @functools.cached_property
    def distinct(self) -> np.ndarray:
        """The array, with a single head if all have the same blocks."""
        first = self.blocks[:1]
        is_shared = self.blocks.strides[0] == 0 or (self.blocks == first).all()
        return first if is_shared else self.blocks

    @functools.cached_property
    def fraction(self) -> float:
        """Active blocks over all blocks."""
        return float(self.distinct.mean())
