"""How are slices of tensors copied: cast, transposed, and by all cores?"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np

_ROWS = 64
"""Copied at once: transposed, they stay in a cache, as a whole matrix does not."""


_ALIGNED = 64
"""Bytes: where an array begins there, a CPU device takes it without a copy."""


def empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array to be written, aligned for devices."""
    size = math.prod(shape) * dtype.itemsize
    held = np.empty(size + _ALIGNED, np.uint8)
    first = -held.ctypes.data % _ALIGNED
    return held[first : first + size].view(dtype).reshape(shape)


def copy_into(out: np.ndarray, found: np.ndarray) -> None:
    """Copy an array into another of its shape, whatever their dtypes and strides.

    Args:
      out: is written.
      found: is read, once.
    """
    is_transposed = found.ndim == 2 and found.strides[0] < found.strides[1]
    if is_transposed:
        out, found = out.T, found.T
    if not found.ndim:
        out[...] = found
        return
    for first in range(0, len(found), _ROWS):
        rows = slice(first, first + _ROWS)
        out[rows] = _widened(found[rows], out.dtype)


def run_all(copies: Iterable[Callable[[], None]]) -> None:
    """Run copies on all cores; an exception of one is raised."""
    # NumPy lets other threads run while it copies.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(copy) for copy in copies]:
            done.result()


def _widened(found: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """bf16 as fp32, whose upper half it is; others as they are."""
    if found.dtype != jnp.bfloat16 or dtype != np.float32:
        return found
    return (found.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
