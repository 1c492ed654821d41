"""How do arrays in host memory pass through a device, a piece at a time?

One scan over pieces: while a piece is computed with, the next is read and the one
before is written. Three pieces of each array are on the device at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.offload.chunks import StreamChunks
from jaxpar.sharding.collectives import row_major

_DEVICE = jax.memory.Space.Device

Pieces = Sequence[jax.Array]


def stream_through(
    compute: Callable[[Pieces, Pieces], Pieces],
    stored: Pieces,
    beside: Pieces,
    chunks: StreamChunks,
) -> list[jax.Array]:
    """Replace every piece of arrays by what is computed of it; traceable.

    Args:
      compute: ``(pieces of stored, pieces of beside) -> new pieces of stored``.
      stored: arrays of one shape, in host memory.
      beside: arrays in device memory, of that shape.
      chunks: the pieces.

    Returns:
      The new arrays, in the memory of the old ones; in place where they are donated.
    """
    last = chunks.num - 1

    def computed(pieces: Pieces, number: jax.Array) -> list[jax.Array]:
        return list(compute(pieces, [chunks.read(x, number) for x in beside]))

    if not last:
        number = jnp.int32(0)
        new = computed([_fetch(chunks, x, number) for x in stored], number)
        return [_beside(*pair) for pair in zip(stored, new, strict=True)]

    def turn(carry: Any, number: jax.Array) -> tuple[Any, None]:
        arrays, here, done = carry
        given = jnp.minimum(number + 1, last), jnp.maximum(number - 1, 0)
        new = computed(here, number)
        pairs = list(zip(arrays, done, strict=True))
        moved = [
            _exchange(chunks, *pair, *given, first=place % 2 == 0)
            for place, pair in enumerate(pairs)
        ]
        arrays, ahead = [x for x, _ in moved], [x for _, x in moved]
        return (arrays, ahead, new), None

    first = [_fetch(chunks, x, jnp.int32(0)) for x in stored]
    # The first turn writes the first piece as it was.
    begin = list(stored), first, first
    (arrays, _, done), _ = jax.lax.scan(turn, begin, jnp.arange(last + 1))
    return [
        _store(chunks, x, piece, jnp.int32(last))
        for x, piece in zip(arrays, done, strict=True)
    ]


def stream_in(
    change: Callable[[jax.Array], jax.Array], stored: jax.Array, chunks: StreamChunks
) -> jax.Array:
    """Copy an array from host to device memory, changed on the way; traceable.

    Args:
      change: of a piece; keeps its shape.
      stored: in host memory.
      chunks: the pieces.
    """
    last = chunks.num - 1
    first = _fetch(chunks, stored, jnp.int32(0))
    if not last:
        return change(first)

    def turn(carry: Any, number: jax.Array) -> tuple[Any, None]:
        out, here = carry
        ahead = _fetch(chunks, stored, jnp.minimum(number + 1, last))
        return (chunks.write(out, change(here), number), ahead), None

    out = jnp.zeros(chunks.shape, jax.eval_shape(change, first).dtype)
    return jax.lax.scan(turn, (out, first), jnp.arange(last + 1))[0][0]


def _exchange(
    chunks: StreamChunks,
    array: jax.Array,
    done: jax.Array,
    to_read: jax.Array,
    to_write: jax.Array,
    *,
    first: bool,
) -> tuple[jax.Array, jax.Array]:
    """Read one piece and write another, which must be one after the other.

    A write beside a read of the same array would make the compiler copy all of it. Some
    arrays are read first and others written first, so that both directions are busy.
    """
    if first:
        ahead = _fetch(chunks, array, to_read)
        ahead, done = jax.lax.optimization_barrier((ahead, done))
        return _store(chunks, array, done, to_write), ahead
    array = _store(chunks, array, done, to_write)
    return array, _fetch(chunks, array, to_read)


def _fetch(chunks: StreamChunks, array: jax.Array, number: jax.Array) -> jax.Array:
    # XLA:TPU gives a piece the layout of what it is used with, and aborts, else.
    return jax.device_put(row_major(chunks.read(array, number)), _DEVICE)


def _store(
    chunks: StreamChunks, array: jax.Array, piece: jax.Array, number: jax.Array
) -> jax.Array:
    return chunks.write(array, row_major(_beside(array, piece)), number)


def _beside(array: jax.Array, piece: jax.Array) -> jax.Array:
    """A piece in the memory of its array."""
    return jax.device_put(piece, jax.typeof(array).memory_space)
