"""Are the bytes that a run reads those that it began with? Hashed in blocks.

A block is hashed when the corpus's identity is computed, and again when a process first
reads it. Blocks are small, because the first read of a window reads all of its block.
"""

import os
from pathlib import Path

import numpy as np
import xxhash
from jaxtyping import UInt64

BLOCK_BYTES = 1 << 18
"""A power of two, so that a block holds whole ids."""


class BlockHasher:
    """Hash a stream of bytes in blocks, however it is cut into updates.

    Example:
      >>> hasher = BlockHasher()
      >>> hasher.update(b"any bytes")
      >>> hasher.values().shape
      (1,)
    """

    def __init__(self):
        self._whole: list[int] = []
        self._open, self._filled = xxhash.xxh3_64(), 0

    def update(self, data: bytes | np.ndarray) -> None:
        """Add bytes, or the bytes of an array."""
        view = memoryview(data).cast("B")
        while view:
            taken = view[: BLOCK_BYTES - self._filled]
            self._open.update(taken)
            self._filled += len(taken)
            view = view[len(taken) :]
            if self._filled == BLOCK_BYTES:
                self._whole.append(self._open.intdigest())
                self._open, self._filled = xxhash.xxh3_64(), 0

    def values(self) -> UInt64[np.ndarray, "_"]:
        """Hashes of all blocks; the last one may be a shorter block's."""
        last = [self._open.intdigest()] if self._filled else []
        return np.array([*self._whole, *last], np.uint64)


def num_blocks(num_bytes: int) -> int:
    """Blocks of so many bytes."""
    return -(-num_bytes // BLOCK_BYTES)


def keep_hashes(
    path: str | os.PathLike[str], hashes: UInt64[np.ndarray, "blocks"]
) -> UInt64[np.ndarray, "blocks"]:
    """Write hashes at the first start; read them at any later one.

    Processes that start at once write the same.

    Args:
      path: of the file, a ``.npy``.
      hashes: what is written if there is no such file.

    Returns:
      The hashes that the file holds.

    Raises:
      ValueError: if the file holds another number of hashes, or something else.
    """
    path = Path(path)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        with unfinished.open("wb") as file:
            np.save(file, hashes)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    try:
        kept = np.load(path)
    except (ValueError, EOFError) as error:
        raise ValueError(_wrong(path, str(error))) from error
    if kept.shape != hashes.shape or kept.dtype != np.uint64:
        raise ValueError(
            _wrong(path, f"{kept.dtype} {kept.shape}, expected uint64 {hashes.shape}")
        )
    return kept


def _wrong(path: Path, why: str) -> str:
    return (
        f"'{path}' does not hold the block hashes of this corpus ({why}); delete it to "
        "accept the corpus as it is now."
    )
