"""What do users call: signs of sums as bits, and bits as numbers.

An array is rows of `columns` elements. A byte has the signs of a column of eight rows,
the first row's in its lowest bit: neighbours in memory are in neighbouring bytes, and
what elements have in common by their column, their bytes have.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.backend import Choice, choose
from kernels_pallas.sign_bits import reference
from kernels_pallas.sign_bits.reference import ROWS, Packed

COLUMNS = 512
"""A number of columns that the kernels take, and in which they read fastest."""


def pack(
    x: jax.Array,
    error: jax.Array,
    mask: jax.Array,
    *,
    columns: int = COLUMNS,
    implementation: Choice | None = None,
    interpret: Any = None,
) -> Packed:
    """Add an error to an array, and take signs and the sum of squares, in one pass.

    One kernel on a Hopper GPU, if there are whole tiles: 4,096 elements each, in 4 to
    512 columns, a power of two. Plain JAX computes the same bits; the sum of
    squares differs by its rounding.

    Args:
      x: fp32, [elements].
      error: fp32, [elements].
      mask: bool or uint8, [elements]: what is not 0. The kernel reads uint8: XLA
        converts bool to it in a pass of its own.
      columns: elements of a row; zeros are added until there are eight whole rows.
      implementation: the name of one; None for the fastest that runs here.
      interpret: for the kernel on a CPU: ``plgpu.InterpretGPUParams()``.

    Returns:
      The sum, its bits, and the sum of its squares.

    Raises:
      ValueError: if an array has a wrong shape or dtype, or the requested
        implementation is unknown or does not run here.

    Example:
      >>> x, mask = jnp.array([-1.0, 2.0, 3.0]), jnp.ones(3, bool)
      >>> [int(x) for x in pack(x, jnp.zeros(3), mask, columns=1).bits]
      [254]
    """
    _check("x", x, (x.size,), jnp.float32)
    size = _check_others(error, mask, x.size)
    run = _implementation(size, columns, implementation, interpret)
    return run.pack(x, error, mask, columns=columns, **_options(run, interpret))


def pack_mean(
    bits: jax.Array,
    scales: jax.Array,
    error: jax.Array,
    mask: jax.Array,
    *,
    columns: int = COLUMNS,
    implementation: Choice | None = None,
    interpret: Any = None,
) -> Packed:
    """`pack` the mean of what several workers have packed, in one pass.

    Args:
      bits: uint8, [workers, bytes], of eight elements each.
      scales: fp32, [workers]: the size of a worker's numbers.
      error: as of `pack`; of as many elements as the workers' arrays had.
      mask: likewise.
      columns: likewise.
      implementation: likewise; the kernel needs a power of two of workers.
      interpret: likewise.

    Returns:
      As of `pack`.

    Raises:
      ValueError: as of `pack`.
    """
    size = _check_others(error, mask, error.size)
    num_bytes = -(-size // (ROWS * columns)) * columns
    _check("bits", bits, (len(bits), num_bytes), jnp.uint8)
    _check("scales", scales, (len(bits),), jnp.float32)
    run = _implementation(size, columns, implementation, interpret, len(bits))
    options = _options(run, interpret)
    return run.pack_mean(bits, scales, error, mask, columns=columns, **options)


def unpack(bits: jax.Array, scales: jax.Array, *, columns: int) -> jax.Array:
    """Make numbers of bits: an element's is its scale, or minus its scale.

    Plain JAX everywhere: XLA makes one pass of it, together with what reads it.

    Args:
      bits: uint8, [..., bytes], as `pack` makes them.
      scales: fp32, of a shape that broadcasts with [..., columns].
      columns: as of `pack`.

    Returns:
      fp32, [..., 8 * bytes].

    Example:
      >>> unpack(jnp.array([5], jnp.uint8), jnp.array([2.0]), columns=1)[:4].tolist()
      [2.0, -2.0, 2.0, -2.0]
    """
    return reference.unpack(bits, scales, columns=columns)


def _implementation(
    size: int, columns: int, asked: Choice | None, interpret: Any, workers: int = 1
) -> Any:
    """The module; plain JAX, and nothing is logged, if there are no whole tiles."""
    unsupported = None
    if not size or size % (ROWS * COLUMNS) or COLUMNS % columns or columns % 4:
        unsupported = f"{size} elements in {columns} columns are not whole tiles"
    if workers & (workers - 1):
        unsupported = f"{workers} workers are not a power of two"
    if interpret is None and (
        (unsupported and asked is None)
        or choose("sign bits", asked, unsupported=unsupported) == "reference"
    ):
        return reference
    # Some jax versions have no Mosaic GPU.
    from kernels_pallas.sign_bits import mosaic  # noqa: PLC0415

    return mosaic


def _options(run: Any, interpret: Any) -> dict[str, Any]:
    return {} if run is reference else {"interpret": interpret}


def _check_others(error: jax.Array, mask: jax.Array, size: int) -> int:
    _check("error", error, (size,), jnp.float32)
    _check("mask", mask, (size,), jnp.bool_, jnp.uint8)
    return size


def _check(name: str, array: jax.Array, shape: tuple[int, ...], *dtypes: Any) -> None:
    if array.dtype not in dtypes or array.shape != shape:
        kinds = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise ValueError(
            f"{name}: {array.dtype.name} of shape {array.shape} must be {kinds} of "
            f"shape {shape}."
        )
