"""Is each tile multiplied by its expert's kernel, on any mesh?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models.experts import grouped
from jaxpar.models.experts.grouped import (
    fraction_used,
    grouped_matmul,
    rows_of_tile,
)
from jaxpar.models.experts.slots import Tiles, slots_by_tiles

E, T, D, F = 3, 4, 8, 12


def problem() -> tuple[jax.Array, jax.Array, Tiles]:
    rng = np.random.default_rng(0)
    experts = jnp.asarray(rng.integers(0, E, (17, 1)), jnp.int32)
    tiles = slots_by_tiles(experts, E, T)
    shape = (tiles.experts.size, T, D)
    rows = jnp.asarray(rng.normal(size=shape), jnp.float32)
    rows = rows * tiles.is_used[:, None, None]
    return rows, jnp.asarray(rng.normal(size=(E, D, F)), jnp.float32), tiles


def plainly(rows: jax.Array, kernel: jax.Array, tiles: Tiles) -> jax.Array:
    product = jnp.einsum("mtd,mdf->mtf", rows, kernel[tiles.experts])
    return product * tiles.is_used[:, None, None]


def values(fn, rows, kernel, tiles) -> list[np.ndarray]:
    out, pull = jax.vjp(lambda x, k: fn(x, k, tiles), rows, kernel)
    return [np.asarray(x) for x in (out, *pull(jnp.cos(out)))]


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("split", ["in", "out"])
def test_products_and_gradients_are_those_of_the_definition(split, tensor) -> None:
    rows, kernel, tiles = problem()
    right = values(plainly, rows, kernel, tiles)
    mesh = make_mesh(MeshShape(tensor=tensor), jax.devices()[:tensor])

    def ours(x, k, tiles):
        return grouped_matmul(x, k, tiles, split=split)

    with jax.set_mesh(mesh):
        found = jax.jit(lambda x, k: values_of(ours, x, k, tiles))(rows, kernel)
    for own, other in zip(found, right, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def values_of(fn, rows, kernel, tiles):
    out, pull = jax.vjp(lambda x, k: fn(x, k, tiles), rows, kernel)
    return out, *pull(jnp.cos(out))


def test_the_loop_has_no_collective() -> None:
    """One sum over tensor behind the loop, not one for each tile."""
    rows, kernel, tiles = problem()
    mesh = make_mesh(MeshShape(tensor=2), jax.devices()[:2])
    with jax.set_mesh(mesh):
        fn = jax.jit(lambda x, k: grouped_matmul(x, k, tiles, split="in"))
        text = fn.lower(rows, kernel).compile().as_text()
    bodies = [part for part in text.split("\n\n") if "%region" in part[:40]]
    assert text.count(" all-reduce(") == 1
    assert not any(" all-reduce(" in body and "while" in body for body in bodies)


def test_ragged_dot_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a TPU runs."""
    rows, kernel, tiles = problem()
    right = values(plainly, rows, kernel, tiles)
    monkeypatch.setattr(grouped, "device_kind", lambda: "TPU v5p")
    ours = values(
        lambda x, k, tiles: grouped_matmul(x, k, tiles, split="in"), rows, kernel, tiles
    )
    for own, other in zip(ours, right, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def test_half_precision_sums_gradients_in_fp32() -> None:
    rows, kernel, tiles = problem()
    right = values(plainly, rows, kernel, tiles)
    half = [x.astype(jnp.bfloat16) for x in (rows, kernel)]

    def ours(x, k, tiles):
        return grouped_matmul(x, k, tiles, split="out")

    for own, other in zip(values(ours, *half, tiles), right, strict=True):
        assert own.dtype == jnp.bfloat16
        np.testing.assert_allclose(own.astype(np.float32), other, atol=0.15)


def test_tiles_are_not_thin_and_seldom_empty() -> None:
    assert rows_of_tile(4096, 8) == 64
    assert rows_of_tile(10, 8) == 8
    assert rows_of_tile(10**7, 8) == 512


@pytest.mark.parametrize(("own", "ways"), [(8, 1), (1, 8)])
def test_plans_count_the_tiles_that_have_rows(own, ways) -> None:
    """Of experts chosen alike, and one device's: its tiles could take all choices."""
    choices = 4096
    tile = rows_of_tile(choices, own)
    experts = jnp.arange(choices * ways)[:, None] % (own * ways)
    here = jnp.where(experts < own, experts, own)
    is_used = slots_by_tiles(here, own, tile).is_used
    fraction = fraction_used(choices, own, is_used.size)
    assert fraction == pytest.approx(float(is_used.mean()), abs=own / is_used.size)
