"""Does a shard draw the numbers that one device would draw for its rows?"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.jaxprs.draws import find_draws
from jaxpar.step.row_draws import (
    UNPROVED,
    BatchRows,
    OfAll,
    OwnRows,
    ShardKey,
    own_bits,
    own_keys,
    row_dims,
    traced,
)
from jaxpar.step.row_draws import _positions as positions

SHARDS, ROWS = 4, 3
X = np.arange(SHARDS * ROWS * 2, dtype=np.float32).reshape(SHARDS * ROWS, 2)


@pytest.mark.parametrize(
    ("shape", "dim", "width"),
    [((3, 5), 0, 32), ((2, 3, 4), 1, 8), ((6,), 0, 16), ((2, 3, 4), 1, 32)],
)
def test_own_bits_are_a_slice_of_all_bits(shape: tuple, dim: int, width: int) -> None:
    key, dtype = jax.random.key(7), {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}
    whole = tuple(n * SHARDS if i == dim else n for i, n in enumerate(shape))
    right = jnp.split(jax.random.bits(key, whole, dtype[width]), SHARDS, dim)

    @jax.jit
    def own(first: jax.Array) -> jax.Array:
        bits = own_bits(key, shape=shape, of_all=OfAll(dim, first, 1, SHARDS))
        return bits.astype(dtype[width])

    for shard in range(SHARDS):
        found = own(jnp.int32(shard * shape[dim]))
        np.testing.assert_array_equal(found, right[shard])


def test_own_bits_may_be_of_every_other_row() -> None:
    key = jax.random.key(7)
    whole = jax.random.bits(key, (2 * ROWS, 5))

    @jax.jit
    def own(first: jax.Array) -> jax.Array:
        return own_bits(key, shape=(ROWS, 5), of_all=OfAll(0, first, 2, 2))

    for part in range(2):
        found = own(jnp.int32(part))
        np.testing.assert_array_equal(found, whole[part::2])


def test_own_keys_are_a_slice_of_all_keys() -> None:
    key = jax.random.key(3)
    right = jax.random.key_data(jax.random.split(key, SHARDS * ROWS))

    @jax.jit
    def own(first: jax.Array) -> jax.Array:
        return own_keys(key, shape=(ROWS,), of_all=OfAll(0, first, 1, SHARDS))

    for shard in range(SHARDS):
        found = own(jnp.int32(shard * ROWS))
        rows = slice(shard * ROWS, (shard + 1) * ROWS)
        np.testing.assert_array_equal(jax.random.key_data(found), right[rows])


@pytest.mark.parametrize(
    ("shape", "dim", "num_shards", "shard"),
    [
        ((3, 5), 0, 2**31, 2**30 + 12345),
        ((3, 5, 7), 1, 2**29, 987654),
        ((2, 3, 65537), 1, 70001, 70000),
        ((3, 4), 0, 4, 3),
    ],
)
def test_positions_count_beyond_32_bits(
    shape: tuple, dim: int, num_shards: int, shard: int
) -> None:
    whole = [n * num_shards if i == dim else n for i, n in enumerate(shape)]
    strides = [math.prod(whole[i + 1 :]) for i in range(len(shape))]
    right = np.zeros(shape, np.uint64)
    for i, index in enumerate(np.indices(shape).astype(np.uint64)):
        start = shard * shape[i] if i == dim else 0
        right += (index + np.uint64(start)) * np.uint64(strides[i])
    first = jnp.uint32(shard * shape[dim] % 2**32)

    @jax.jit
    def found(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        return positions(shape, OfAll(dim, first, 1, num_shards))

    high, low = jax.device_get(found(first))
    np.testing.assert_array_equal(low, (right % 2**32).astype(np.uint32))
    np.testing.assert_array_equal(high, (right // 2**32).astype(np.uint32))


def dropout(key: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)


def in_a_scan(key: jax.Array, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, key: jax.Array) -> tuple:
        return dropout(key, x) + 1.0, None

    return jax.lax.scan(jax.checkpoint(layer), x, jax.random.split(key, 3))[0]


def in_a_branch(key: jax.Array, x: jax.Array) -> jax.Array:
    once = jax.random.bernoulli(jax.random.fold_in(key, 1))
    return jax.lax.cond(once, lambda: dropout(key, x), lambda: x + jnp.sum(key_of(key)))


def key_of(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (2,))


def keys_by_row(key: jax.Array, x: jax.Array) -> jax.Array:
    return jax.vmap(dropout)(jax.random.split(key, len(x)), x)


def rows_second(key: jax.Array, x: jax.Array) -> jax.Array:
    noise = jax.vmap(lambda key: jax.random.normal(key, (2, len(x))))
    return x + noise(jax.random.split(key, 5)).sum(0).T


def own_seed(key: jax.Array, x: jax.Array) -> jax.Array:
    return x + jax.random.normal(jax.random.PRNGKey(4), x.shape)


def rejected(key: jax.Array, x: jax.Array) -> jax.Array:
    return x + jax.random.poisson(key, 3, (len(x),))[:, None]


PROVED = [dropout, in_a_scan, in_a_branch, keys_by_row, rows_second, own_seed, rejected]


def on_shards(fn: Callable, key: jax.Array) -> jax.Array:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=SHARDS), jax.devices()[:SHARDS])

    def body(key: jax.Array, x: jax.Array) -> jax.Array:
        own = ShardKey(key, jax.lax.axis_index("data"))
        twice = jax.ShapeDtypeStruct((2 * ROWS, 2), jnp.float32)
        return OwnRows(SHARDS).call(fn, own, (x,), BatchRows(ROWS, lambda: (twice,)))

    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    return jax.jit(run)(key, X)


@pytest.mark.parametrize("fn", PROVED)
def test_shards_together_draw_what_one_device_draws(fn: Callable) -> None:
    key = jax.random.key(1)
    np.testing.assert_allclose(on_shards(fn, key), jax.jit(fn)(key, X), rtol=1e-6)


def flattened(key: jax.Array, x: jax.Array) -> jax.Array:
    return dropout(key, x.reshape(-1)).reshape(x.shape)


def square(key: jax.Array, x: jax.Array) -> jax.Array:
    return x + jax.random.normal(key, (len(x), len(x))).sum(1, keepdims=True)


def numbered(key: jax.Array, x: jax.Array) -> jax.Array:
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(len(x)))
    return jax.vmap(dropout)(keys, x)


def other_kind(key: jax.Array, x: jax.Array) -> jax.Array:
    return dropout(jax.random.key(5, impl="rbg"), x)


@jax.custom_vjp
def hidden(key: jax.Array, x: jax.Array) -> jax.Array:
    return dropout(key, x)


hidden.defvjp(lambda key, x: (dropout(key, x), None), lambda _, ct: (None, ct))


def opaque(key: jax.Array, x: jax.Array) -> jax.Array:
    return x * jax.random.gamma(key, 2.0, (len(x),))[:, None]


def of_three_rows(key: jax.Array, x: jax.Array) -> jax.Array:
    return dropout(key, x.reshape(3, 2))


@pytest.mark.parametrize(
    "fn", [flattened, square, numbered, other_kind, hidden, opaque, of_three_rows]
)
def test_what_cannot_be_proved_differs_from_shard_to_shard(fn: Callable) -> None:
    found = on_shards(lambda key, x: fn(key, jnp.ones_like(x)), jax.random.key(1))
    shards = np.split(np.asarray(found), SHARDS)
    assert len({shard.tobytes() for shard in shards}) > 1


def dims_of(fn: Callable, count: int = ROWS) -> Any:
    key = jax.eval_shape(lambda: jax.random.key(0))
    one, wide = (
        (jax.ShapeDtypeStruct((rows, 2), jnp.float32),) for rows in (count, 2 * count)
    )
    draws = find_draws(traced(fn, key, one)[0].jaxpr)
    return list(row_dims(draws, fn, key, BatchRows(count, lambda: wide)).values())


def test_row_dims_are_found_and_what_is_shared_is_left() -> None:
    assert dims_of(dropout) == [0]
    assert dims_of(rows_second)[-1] == 1
    assert dims_of(lambda key, x: x * jax.random.normal(key, (3, 2)).sum()) == [None]
    assert dims_of(flattened) == dims_of(square) == [UNPROVED]
    assert dims_of(of_three_rows) == dims_of(hidden) == []


def test_rows_are_found_where_one_row_takes_fewer_operations() -> None:
    """As broadcasting does; every draw of flax's sst2 was unproved at one row."""
    assert dims_of(lambda k, x: dropout(k, x if len(x) < 2 else x[::-1]), 1) == [0]
