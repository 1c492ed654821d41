"""Are signs packed as NumPy packs them, and do the kernels do the same to the bit?"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh

from kernels_pallas.sign_bits import COLUMNS, Packed, pack, pack_mean, unpack
from tests.kernels_pallas.marks import needs_mosaic
from tests.kernels_pallas.races import watched

TILE = 8 * COLUMNS
SPECIAL = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 2e-38, -2e-38]
COUNTS = [1, 2, 8, 32]


def arrays(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An array, an error and a mask: a seventh is left out, first of all a zero."""
    rng = np.random.default_rng(size)
    x, error = rng.standard_normal((2, size)).astype(np.float32)
    few = min(size, len(SPECIAL))
    x[:few], error[:few] = SPECIAL[:few], 0
    return x, error, np.arange(size) % 7 != 3


def sent(size: int, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """Bits and scales of several workers."""
    rng = np.random.default_rng(workers)
    bits = rng.integers(0, 256, (workers, size // 8), np.uint8)
    return bits, rng.random(workers).astype(np.float32)


def numpy_packed(x: np.ndarray, error: Any, mask: np.ndarray, columns: int) -> Packed:
    given = np.where(mask, x + error, np.float32(0))
    padded = np.pad(given, (0, -x.size % (8 * columns)))
    rows = (padded >= 0).reshape(-1, 8, columns)
    bits = np.packbits(rows, axis=1, bitorder="little").reshape(-1)
    return Packed(given, bits, np.square(np.float64(given)).sum())


def numpy_mean(bits: np.ndarray, scales: np.ndarray, columns: int) -> np.ndarray:
    """Added up in the order of the workers."""
    rows = bits.reshape(len(bits), -1, 1, columns)
    signs = np.unpackbits(rows, axis=2, bitorder="little").reshape(len(bits), -1)
    total = np.zeros(signs.shape[1], np.float32)
    for own, scale in zip(signs, scales, strict=True):
        total += np.where(own > 0, scale, -scale)
    return total / np.float32(len(bits))


def assert_equal(found: Packed, right: Packed) -> None:
    """To the bit, the sum of squares but for its rounding; also of NaN and -0."""
    given = np.asarray(found.given)
    is_nan = np.isnan(right.given)
    np.testing.assert_array_equal(np.isnan(given), is_nan)
    pair = (x[~is_nan].view(np.uint32) for x in (given, np.asarray(right.given)))
    np.testing.assert_array_equal(*pair)
    np.testing.assert_array_equal(found.bits, right.bits)
    np.testing.assert_allclose(found.squares, right.squares, rtol=1e-5)


@pytest.mark.parametrize(("size", "columns"), [(1, 1), (100, 4), (TILE, COLUMNS)])
def test_signs_are_packed_as_numpy_does(size: int, columns: int) -> None:
    given = arrays(size)
    found = jax.jit(functools.partial(pack, columns=columns))(*given)
    assert_equal(found, numpy_packed(*given, columns))


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_mean_of_workers_is_that_of_numpy(workers: int) -> None:
    """But for rounding: XLA adds in an order of its own."""
    columns, (bits, scales) = 16, sent(1024, workers)
    _, error, mask = arrays(1024)
    run = functools.partial(pack_mean, columns=columns)
    found = jax.jit(run)(bits, scales, error, mask)
    right = numpy_packed(numpy_mean(bits, scales, columns), error, mask, columns)
    np.testing.assert_allclose(found.given, right.given, atol=1e-6)
    np.testing.assert_allclose(found.squares, right.squares, rtol=1e-5)
    own = numpy_packed(np.asarray(found.given), 0, mask, columns)
    np.testing.assert_array_equal(found.bits, own.bits)


def test_bits_become_what_they_were_made_of() -> None:
    x, _, _ = arrays(TILE)
    x[:8] = 1
    bits = pack(*map(jnp.asarray, (x, 0 * x, x == x)), columns=64).bits
    scales = jnp.arange(1.0, 65)
    found = unpack(bits, scales, columns=64)
    np.testing.assert_array_equal(found, np.sign(x) * np.tile(scales, TILE // 64))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of the kernels in Mosaic's CPU interpreter; races are looked for."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: PLC0415

    from kernels_pallas.sign_bits import mosaic  # noqa: PLC0415

    for name in ("pack", "pack_mean"):
        monkeypatch.setattr(mosaic, name, watched(getattr(mosaic, name)))
    return {"interpret": plgpu.InterpretGPUParams(detect_races=True)}


@needs_mosaic
@pytest.mark.parametrize("columns", [COLUMNS, 4])
def test_kernel_packs_to_the_bit(columns: int, interpreted: dict[str, Any]) -> None:
    given = arrays(2 * TILE)
    found = pack(*map(jnp.asarray, given), columns=columns, **interpreted)
    assert_equal(found, numpy_packed(*given, columns))


@needs_mosaic
@pytest.mark.parametrize("workers", COUNTS)
def test_kernel_averages_to_the_bit(workers: int, interpreted: dict[str, Any]) -> None:
    """In the order of the workers."""
    columns, (bits, scales) = COLUMNS // workers, sent(TILE, workers)
    _, error, mask = arrays(TILE)
    given = map(jnp.asarray, (bits, scales, error, mask))
    found = pack_mean(*given, columns=columns, **interpreted)
    mean = numpy_mean(bits, scales, columns)
    assert_equal(found, numpy_packed(mean, error, mask, columns))


@pytest.mark.gpu
@pytest.mark.parametrize("workers", COUNTS)
def test_kernels_on_a_gpu_do_what_numpy_does(workers: int) -> None:
    given, size = arrays(1000 * TILE), 1000 * TILE
    found = jax.jit(functools.partial(pack, implementation="mosaic"))(*given)
    assert_equal(found, numpy_packed(*given, COLUMNS))
    options = {"columns": COLUMNS // workers}
    run = functools.partial(pack_mean, implementation="mosaic", **options)
    bits, scales = sent(size, workers)
    found = jax.jit(run)(bits, scales, *given[1:])
    mean = numpy_mean(bits, scales, COLUMNS // workers)
    assert_equal(found, numpy_packed(mean, *given[1:], COLUMNS // workers))


def kernels_for_h200(call: Any, *args: Any) -> int:
    """How many a call is lowered to."""
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("mosaic_gpu_v2")


@needs_mosaic
@pytest.mark.parametrize(
    ("size", "columns", "workers"),
    [*itertools.product([3 * TILE], [COLUMNS, 4], [2, 64])],
)
def test_whole_tiles_are_packed_by_kernels(
    size: int, columns: int, workers: int
) -> None:
    given = arrays(size)
    options = {"columns": columns}
    assert kernels_for_h200(functools.partial(pack, **options), *given) == 1
    mean = functools.partial(pack_mean, **options)
    assert kernels_for_h200(mean, *sent(size, workers), *given[1:]) == 1


@needs_mosaic
@pytest.mark.parametrize(
    ("size", "columns", "workers"),
    [(0, COLUMNS, 2), (TILE // 2, 64, 2), (3 * TILE, 2, 2), (3 * TILE, 64, 3)],
)
def test_others_are_packed_in_plain_jax(size: int, columns: int, workers: int) -> None:
    _, error, mask = arrays(size)
    mean = functools.partial(pack_mean, columns=columns)
    assert kernels_for_h200(mean, *sent(size, workers), error, mask) == 0


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones((2, 4))}, r"x: float32 of shape \(2, 4\) must be .* \(8,\)"),
        ({"x": jnp.ones(8, jnp.bfloat16)}, "x: bfloat16 of shape"),
        ({"error": jnp.ones(4)}, r"error: float32 of shape \(4,\)"),
        ({"mask": jnp.ones(8)}, "mask: float32 .* must be bool or uint8"),
        ({"implementation": "xla"}, "implementation='xla': must be 'mosaic' or 'refer"),
        ({"implementation": "mosaic"}, "sign bits can't run here"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    given = {"x": jnp.ones(8), "error": jnp.ones(8), "mask": jnp.ones(8, bool)}
    with pytest.raises(ValueError, match=message):
        pack(**given | change)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": jnp.ones((2, 3), jnp.uint8)}, r"bits: uint8 of shape \(2, 3\) must"),
        ({"scales": jnp.ones(1)}, r"scales: float32 of shape \(1,\) must be .* \(2,\)"),
    ],
)
def test_bits_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    given = {"bits": jnp.ones((2, 1), jnp.uint8), "scales": jnp.ones(2)}
    given |= {"error": jnp.ones(8), "mask": jnp.ones(8, bool), "columns": 1}
    with pytest.raises(ValueError, match=message):
        pack_mean(**given | change)
