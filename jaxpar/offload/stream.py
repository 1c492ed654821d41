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
    compute: Callable[[Pieces, Pieces], tuple[Pieces, Pieces]],
    stored: Pieces,
    beside: Pieces,
    chunks: StreamChunks,
    kept: Pieces = (),
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Replace every piece of arrays by what is computed of it; traceable.

    Args:
      compute: ``(pieces of stored, pieces of beside) -> (new pieces of stored, pieces
        of kept)``.
      stored: arrays of one shape, in host memory.
      beside: arrays in device memory, of that shape.
      chunks: the pieces.
      kept: arrays in device memory, of that shape, which are replaced too.

    Returns:
      The new arrays, in the memory of the old ones; in place where they are donated.
    """
    last = chunks.num - 1
    # Nothing is read before the gradients are there: XLA:TPU would begin all leaves.
    zero, *beside = jax.lax.optimization_barrier((jnp.int32(0), *beside))

    def computed(pieces: Pieces, number: jax.Array) -> tuple[list, list]:
        new, made = compute(pieces, [chunks.read(x, number) for x in beside])
        return list(new), list(made)

    if not last:
        new, made = computed([_fetch(chunks, x, zero) for x in stored], zero)
        return [_beside(*pair) for pair in zip(stored, new, strict=True)], made

    def turn(carry: Any, number: jax.Array) -> tuple[Any, None]:
        arrays, kept, here, done = carry
        given = jnp.minimum(number + 1, last), jnp.maximum(number - 1, 0)
        new, made = computed(here, number)
        pairs = zip(kept, made, strict=True)
        kept = [chunks.write(x, piece, number) for x, piece in pairs]
        arrays, ahead = _exchange(chunks, arrays, done, *given)
        return (arrays, kept, ahead, new), None

    first = [_fetch(chunks, x, zero) for x in stored]
    # The first turn writes the first piece as it was.
    begin = list(stored), list(kept), first, first
    (arrays, kept, _, done), _ = jax.lax.scan(turn, begin, jnp.arange(last + 1))
    written = [
        _store(chunks, x, piece, jnp.int32(last))
        for x, piece in zip(arrays, done, strict=True)
    ]
    return written, list(kept)


def stream_in(
    change: Callable[[jax.Array], jax.Array], stored: jax.Array, chunks: StreamChunks
) -> jax.Array:
    """Copy an array from host to device memory, changed on the way; traceable.

    Args:
      change: of a piece; keeps its shape.
      stored: in host memory.
      chunks: the pieces.
    """
    if chunks.num == 1:
        return change(_fetch(chunks, stored, jnp.int32(0)))
    piece = jax.ShapeDtypeStruct(chunks.piece, stored.dtype)
    out = jnp.zeros(chunks.shape, jax.eval_shape(change, piece).dtype)

    def written(out: jax.Array, piece: jax.Array, number: jax.Array) -> jax.Array:
        return chunks.write(out, change(piece), number)

    return _read_through(written, out, stored, chunks)


def stream_sum(
    term: Callable[[jax.Array], jax.Array], stored: jax.Array, chunks: StreamChunks
) -> jax.Array:
    """Add up ``term(piece in fp32)``, a scalar, over an array in host memory."""

    def added(total: jax.Array, piece: jax.Array, _: jax.Array) -> jax.Array:
        return total + term(piece.astype(jnp.float32))

    return _read_through(added, jnp.float32(0), stored, chunks)


def _read_through(
    step: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    begin: jax.Array,
    stored: jax.Array,
    chunks: StreamChunks,
) -> jax.Array:
    """Fold ``step(result, piece, its number)``; the next piece is read meanwhile."""
    last = chunks.num - 1

    def turn(carry: Any, number: jax.Array) -> tuple[Any, None]:
        result, here = carry
        ahead = _fetch(chunks, stored, jnp.minimum(number + 1, last))
        return (step(result, here, number), ahead), None

    start = begin, _fetch(chunks, stored, jnp.int32(0))
    return jax.lax.scan(turn, start, jnp.arange(last + 1))[0][0]


def _exchange(
    chunks: StreamChunks,
    arrays: Pieces,
    done: Pieces,
    to_read: jax.Array,
    to_write: jax.Array,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Read one piece of every array, and write another.

    A write beside a read of the same array would make the compiler copy all of it. So
    while one array is read, the next is written, which is read after that.
    """
    arrays, done, ahead = list(arrays), list(done), []
    for place in range(len(arrays)):
        other = (place + 1) % len(arrays)
        ahead.append(_fetch(chunks, arrays[place], to_read))
        if place or len(arrays) == 1:
            before = max(place - 1, 0)
            pair = ahead[before], done[other]
            ahead[before], done[other] = jax.lax.optimization_barrier(pair)
        arrays[other] = _store(chunks, arrays[other], done[other], to_write)
    return arrays, ahead


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
