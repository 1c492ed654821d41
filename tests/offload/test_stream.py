"""Is every piece read once before it is written, whatever the number of arrays?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.offload.chunks import chunks_of
from jaxpar.offload.stream import stream_in, stream_sum, stream_through

SHAPE = 12, 4


def on_host(seed: int) -> jax.Array:
    place = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )
    return jax.device_put(np.random.default_rng(seed).normal(size=SHAPE), place)


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("arrays", [1, 2, 3, 4])
def test_arrays_are_replaced(arrays: int, rows: int) -> None:
    chunks = chunks_of(SHAPE, rows * SHAPE[1])
    assert chunks.num == SHAPE[0] // rows
    stored = [on_host(number) for number in range(arrays)]
    beside = [jax.device_put(np.arange(48.0).reshape(SHAPE))]
    right = [np.asarray(x) * 2 + np.asarray(beside[0]) for x in stored]

    def compute(pieces, near):
        new = [x * 2 + near[0] for x in pieces]
        return new, [new[0].astype(jnp.bfloat16)]

    def step(stored, beside, kept):
        return stream_through(compute, stored, beside, chunks, kept)

    kept = [jnp.zeros(SHAPE, jnp.bfloat16)]
    places = [x.sharding for x in stored], [kept[0].sharding]
    run = jax.jit(step, out_shardings=places, donate_argnums=(0, 2))
    found, (copy,) = run(stored, beside, kept)
    np.testing.assert_array_equal(copy, right[0].astype(jnp.bfloat16))
    for one, expected in zip(found, right, strict=True):
        assert one.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(one, expected.astype(one.dtype))


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_an_array_is_cast_on_the_way(rows: int) -> None:
    array, chunks = on_host(0), chunks_of(SHAPE, rows * SHAPE[1])

    def cast(x):
        return x.astype(jnp.bfloat16)

    found = jax.jit(lambda x: stream_in(cast, x, chunks))(array)
    assert found.sharding.memory_kind == "device"
    np.testing.assert_array_equal(found, np.asarray(array).astype(jnp.bfloat16))


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_terms_of_all_pieces_are_added(rows: int) -> None:
    array, chunks = on_host(0), chunks_of(SHAPE, rows * SHAPE[1])
    found = jax.jit(lambda x: stream_sum(lambda y: jnp.sum(y * y), x, chunks))(array)
    assert float(found) == pytest.approx(
        float(np.sum(np.asarray(array) ** 2)), rel=1e-6
    )
