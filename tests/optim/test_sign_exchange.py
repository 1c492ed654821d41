"""Are arrays averaged by signs as the definition in NumPy says?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.optim.sign_exchange import SignExchange, SignPiece, sign
from jaxpar.sharding.leaf_sharding import LeafSharding
from kernels_pallas.sign_bits import COLUMNS, pack
from tests.optim.numpy_onebit import NumpyOneBitAdam

WORKERS = 4
SIZES = {"data": WORKERS, "pipe": 1, "tensor": 1}


def leaf_of(*shape: int) -> LeafSharding:
    none = (None,) * len(shape)
    return LeafSharding("w", shape, none, None, ((),) * len(shape), SIZES, "")


WHOLE = 8 * COLUMNS
"""Elements whose signs kernels pack."""


@pytest.mark.parametrize("size", [1, 7, 32, 100, WHOLE])
def test_chunks_have_every_element_once(size: int) -> None:
    piece = SignPiece(leaf_of(size), WORKERS)
    flat = jnp.arange(1.0, size + 1)
    rows = piece.rows(flat)
    assert rows.shape == (WORKERS, piece.chunk)
    assert piece.chunk % 8 == 0
    found = [np.asarray(row)[np.asarray(row) > 0] for row in rows]
    for chunk, own in enumerate(found):
        np.testing.assert_array_equal(own, flat[chunk::WORKERS])


@pytest.mark.parametrize("size", [1, 7, 32, 100, WHOLE, 3 * WHOLE])
def test_signs_arrive_where_their_elements_were(size: int) -> None:
    """Each with its chunk's scale."""
    piece = SignPiece(leaf_of(size), WORKERS)
    flat = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    nothing, everywhere = jnp.zeros(size), jnp.ones(size, bool)
    packed = pack(jnp.asarray(flat), nothing, everywhere, columns=piece.columns)
    bits = packed.bits.reshape(-1, WORKERS).T
    assert bits.shape == (WORKERS, piece.num_bytes)
    scales = np.arange(1.0, WORKERS + 1)
    right = np.sign(flat) * np.resize(scales, size)
    np.testing.assert_array_equal(piece.whole(bits, jnp.asarray(scales)), right)


def exchange_of(leaves: list[LeafSharding]) -> Callable[..., Any]:
    """The exchange on four devices; arrays have the workers as dim 0."""
    mesh = make_mesh(MeshShape(data=WORKERS), jax.devices()[:WORKERS])
    exchange = SignExchange([SignPiece(leaf, WORKERS) for leaf in leaves], ("data",))

    def on_device(arrays: list, masks: list, worker: list, server: list) -> tuple:
        own = [[x[0] for x in part] for part in (arrays, worker, server)]
        found = exchange(own[0], masks, own[1], own[2])
        return tuple([x[None] for x in part] for part in found)

    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(P("data"), P(), P("data"), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    return jax.jit(mapped)


def test_averages_and_errors_are_those_of_numpy() -> None:
    rng, sizes = np.random.default_rng(0), (100, 64, WHOLE)
    leaves = [leaf_of(10, 10), leaf_of(64), leaf_of(8, COLUMNS)]
    arrays = [rng.normal(size=(WORKERS, n)).astype(np.float32) for n in sizes]
    masks = [np.arange(n) % 5 > 0 for n in sizes]
    pieces = [SignPiece(leaf, WORKERS) for leaf in leaves]
    worker = [
        rng.normal(size=x.shape).astype(np.float32) * m
        for x, m in zip(arrays, masks, strict=True)
    ]
    flat = [
        rng.normal(size=n).astype(np.float32) * m
        for n, m in zip(sizes, masks, strict=True)
    ]
    server = [piece.rows(jnp.asarray(x)) for piece, x in zip(pieces, flat, strict=True)]
    found = jax.device_get(exchange_of(leaves)(arrays, masks, worker, server))
    for number, size in enumerate(sizes):
        right = NumpyOneBitAdam({"w": np.zeros(size)}, WORKERS, 0)
        right.set_errors({"w": worker[number]}, {"w": flat[number]})
        average = right._compressed("w", arrays[number], masks[number])
        for own in found[0][number]:
            np.testing.assert_allclose(own, average, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[1][number], right.worker["w"], atol=1e-5)
        rows = jnp.asarray(right.server["w"], jnp.float32)
        rows = pieces[number].rows(rows)
        np.testing.assert_allclose(found[2][number], rows, atol=1e-5)


def test_what_is_left_out_is_sent_later() -> None:
    """Averages of many rounds of one array add up to as many times it."""
    rng, rounds = np.random.default_rng(1), 200
    leaf = leaf_of(64)
    array = rng.normal(size=(WORKERS, 64)).astype(np.float32)
    errors = [[np.zeros_like(array)], [np.zeros((WORKERS, 16), np.float32)]]
    errors[1] = [np.zeros((WORKERS, SignPiece(leaf, WORKERS).chunk), np.float32)]
    total, run = np.zeros(64), exchange_of([leaf])
    for _ in range(rounds):
        found, *errors = run([array], [np.ones(64, bool)], *errors)
        total += np.asarray(found[0][0])
    np.testing.assert_allclose(total / rounds, array.mean(0), atol=0.1)


def test_zero_has_the_sign_one() -> None:
    np.testing.assert_array_equal(sign(jnp.array([-2.0, 0.0, 3.0])), [-1, 1, 1])
