"""The passes as one kernel each for Hopper GPUs; a program makes 512 bytes of bits."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.sign_bits.reference import ROWS, Packed

BYTES = 512
"""Four for each of a program's 128 threads: it loads 16 bytes of fp32 at a time."""

AT_ONCE = 8
"""Workers whose bits are loaded together."""

Rows = list[jax.Array]
Read = Callable[..., jax.Array]


def pack(
    x: jax.Array,
    error: jax.Array,
    mask: jax.Array,
    *,
    columns: int,
    interpret: Any = None,
) -> Packed:
    """See `kernels_pallas.sign_bits.pack`."""

    def rows_of(read: Read, part: Any, x: Any) -> Rows:
        return [read(x, part, row) for row in range(ROWS)]

    given = (x.reshape(-1, ROWS, columns),)
    return _run(rows_of, "pack_signs", given, error, mask, columns, interpret)


def pack_mean(
    bits: jax.Array,
    scales: jax.Array,
    error: jax.Array,
    mask: jax.Array,
    *,
    columns: int,
    interpret: Any = None,
) -> Packed:
    """See `kernels_pallas.sign_bits.pack_mean`."""
    workers = len(bits)
    at_once = min(workers, AT_ONCE)

    def rows_of(read: Read, part: Any, bits: Any, scales: Any) -> Rows:
        def signed(number: Any) -> Rows:
            byte = read(bits, number, part).astype(jnp.int32)
            scale = scales[number]
            flags = [byte & (1 << row) for row in range(ROWS)]
            return [jnp.where(flag != 0, scale, -scale) for flag in flags]

        def added(totals: Rows, numbers: Sequence[Any]) -> Rows:
            for own in [signed(number) for number in numbers]:
                totals = [a + b for a, b in zip(totals, own, strict=True)]
            return totals

        def body(group: jax.Array, totals: Rows) -> Rows:
            return added(totals, [group * at_once + i for i in range(at_once)])

        totals = added(signed(0), range(1, at_once))
        if workers > at_once:
            totals = lax.fori_loop(1, workers // at_once, body, totals)
        return [total * jnp.float32(1 / workers) for total in totals]

    given = bits.reshape(workers, -1, columns), scales
    return _run(rows_of, "pack_mean_signs", given, error, mask, columns, interpret)


def _run(
    rows_of: Callable[..., Rows],
    name: str,
    given: Sequence[jax.Array],
    error: jax.Array,
    mask: jax.Array,
    columns: int,
    interpret: Any,
) -> Packed:
    """Run a pass over an array.

    Args:
      rows_of: makes a program's eight rows, of a function that reads, the program's
        part of them, and `given`.
      name: the kernel's.
      given: what it is made of.
      error: that is added.
      mask: of what is not 0; as bytes.
      columns: of the rows.
      interpret: how to run without a GPU.
    """
    groups, tiles = BYTES // columns, error.size // (ROWS * BYTES)
    layout = plgpu.Layout.WG_STRIDED((groups, columns), vec_size=4)

    def program(*refs: Any) -> None:
        *sources, error, mask, sums, bits, squares = refs
        tile = lax.axis_index("tile")
        part = pl.ds(tile * groups, groups)

        def read(ref: Any, *where: Any) -> jax.Array:
            if interpret is not None:  # It has no layouts.
                return ref[where]
            return plgpu.load(ref.at[where], layout=layout, optimized=False)

        # All loads come before any store, so that they are in flight together.
        others = [[read(x, part, row) for x in (error, mask)] for row in range(ROWS)]
        flags, squares_of = [], []
        for row, x in enumerate(rows_of(read, part, *sources)):
            left, kept = others[row]
            value = jnp.where(kept != 0, x + left, 0.0)
            sums[part, row] = value
            flags.append(jnp.where(value >= 0, jnp.int32(1 << row), jnp.int32(0)))
            squares_of.append(value * value)
        bits[part] = functools.reduce(jnp.bitwise_or, flags).astype(jnp.uint8)
        squares[tile] = jnp.sum(functools.reduce(jnp.add, squares_of))

    def in_rows(array: jax.Array) -> jax.Array:
        """Groups of rows: element indices may need more than 32 bits."""
        return array.reshape(-1, ROWS, columns)

    sums, bits, squares = plgpu.kernel(
        program,
        out_type=[
            jax.ShapeDtypeStruct((tiles * groups, ROWS, columns), jnp.float32),
            jax.ShapeDtypeStruct((tiles * groups, columns), jnp.uint8),
            jax.ShapeDtypeStruct((tiles,), jnp.float32),
        ],
        grid=(tiles,),
        grid_names=("tile",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            # Nothing that is read is written.
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret if interpret is not None else False,
    )(*given, in_rows(error), in_rows(mask.astype(jnp.uint8)))
    return Packed(sums.reshape(-1), bits.reshape(-1), jnp.sum(squares))
