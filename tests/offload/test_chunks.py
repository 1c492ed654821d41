"""Do pieces cover an array once, and lie in one piece of memory?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.offload.chunks import chunks_of


@pytest.mark.parametrize(
    ("shape", "most", "piece"),
    [
        ((12, 64, 32), 1024, (1, 32, 32)),
        ((12, 64, 32), 3000, (1, 64, 32)),
        ((12, 64, 32), 10**9, (12, 64, 32)),
        ((12, 64, 32), 4 * 64 * 32, (4, 64, 32)),
        ((12, 64, 32), 20, (1, 1, 16)),
        ((7, 13), 50, (1, 13)),
        ((50_257, 8), 100_000, (1733, 8)),
        ((64,), 48, (32,)),
        ((), 4, ()),
        ((5,), 0, (1,)),
    ],
)
def test_pieces_cover_the_array_once(shape, most, piece) -> None:
    chunks = chunks_of(shape, most)
    assert chunks.piece == piece
    array = jnp.arange(np.prod(shape, dtype=int)).reshape(shape)
    numbers = range(min(chunks.num, 200))
    pieces = [chunks.read(array, jnp.int32(n)) for n in numbers]
    # Together, one after the other, they are the array as it lies in memory.
    flat = np.concatenate([np.ravel(x) for x in pieces])
    np.testing.assert_array_equal(flat, np.ravel(array)[: flat.size])
    back = jnp.zeros_like(array)
    for number, own in zip(numbers, pieces, strict=True):
        back = jax.jit(chunks.write)(back, own, jnp.int32(number))
    np.testing.assert_array_equal(np.ravel(back)[: flat.size], flat)
