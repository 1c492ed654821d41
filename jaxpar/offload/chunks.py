"""In which pieces is an array streamed: blocks that lie in one piece of memory."""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class StreamChunks:
    """Equal pieces of an array.

    Attributes:
      shape: the array's, on a device.
      piece: a piece's.
    """

    shape: tuple[int, ...]
    piece: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Pieces along each dim."""
        return tuple(n // m for n, m in zip(self.shape, self.piece, strict=True))

    @property
    def num(self) -> int:
        """Pieces."""
        return math.prod(self.counts)

    def read(self, array: jax.Array, number: jax.Array) -> jax.Array:
        """A piece of an array; traceable, in the array's memory."""
        return jax.lax.dynamic_slice(array, self._starts(number), self.piece)

    def write(self, array: jax.Array, piece: jax.Array, number: jax.Array) -> jax.Array:
        """The array with another piece; traceable, in the array's memory."""
        return jax.lax.dynamic_update_slice(array, piece, self._starts(number))

    def _starts(self, number: jax.Array) -> list[jax.Array]:
        places = jnp.unravel_index(number, self.counts)
        return [at * size for at, size in zip(places, self.piece, strict=True)]


def chunks_of(shape: tuple[int, ...], most: int) -> StreamChunks:
    """Cut an array into pieces that lie together.

    Args:
      shape: of the array on a device.
      most: elements of a piece.

    Returns:
      Pieces of at most so many elements; they have one index of the first dims, a part
      of the next, which divides it, and all of the last ones.

    Example:
      >>> chunks_of((12, 64, 32), 1024).piece
      (1, 32, 32)
    """
    piece, room = [], most
    for size in reversed(shape):
        own = max(n for n in _divisors(size) if n <= max(room, 1))
        piece.append(own)
        room = room // size if own == size else 1
    return StreamChunks(shape, tuple(reversed(piece)))


def _divisors(size: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    return small + [size // n for n in small]
