"""The passes as one kernel each, for Hopper GPUs: in place, one program per tile.

Updated arrays are passed as references, so that the compiler gives the kernel the
arguments' own memory; a step that is not applied ends at its first line.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.fused_optimizers import instructions
from kernels_pallas.fused_optimizers.reference import Pass
from kernels_pallas.fused_optimizers.rules import Exact, Rule
from kernels_pallas.fused_optimizers.tiles import APPLIED, TILE

# Four elements per thread at a time: 16 bytes of fp32, 512 contiguous ones for a warp.
_LAYOUT = plgpu.Layout.WG_STRIDED((TILE,), vec_size=4)


class OneTile(Exact):
    """The tile of a program.

    Args:
      refs: operands by name, [tiles, TILE] or [tiles], and "numbers".
      interprets: whether the CPU's interpreter runs the kernel: it has no layouts,
        and none of the GPU's instructions.
    """

    def __init__(self, refs: Mapping[str, Any], *, interprets: bool):
        self._refs, self._interprets = refs, interprets
        # Beside 8-bit codes the last bits of roots don't matter, but their time does.
        has_codes = any(name.endswith("/codes") for name in refs)
        self._approximates = has_codes and not interprets
        self._index = lax.axis_index("tile")

    def read(self, name: str) -> jax.Array:
        """See `Tile`."""
        if self._interprets:
            return self._refs[name][self._index]
        part = self._refs[name].at[self._index]
        return plgpu.load(part, layout=_LAYOUT, optimized=False)

    def write(self, name: str, value: jax.Array) -> None:
        """See `Tile`."""
        self._refs[name][self._index] = value.astype(self._refs[name].dtype)

    def read_one(self, name: str) -> jax.Array:
        """See `Tile`."""
        return self._refs[name][self._index]

    def write_one(self, name: str, value: jax.Array) -> None:
        """See `Tile`."""
        self._refs[name][self._index] = value

    def number(self, place: int) -> jax.Array:
        """See `Tile`."""
        return self._refs["numbers"][place]

    def has(self, name: str) -> bool:
        """See `Tile`."""
        return name in self._refs

    def largest(self, value: jax.Array) -> jax.Array:
        """See `Tile`."""
        return jnp.max(value)

    def sqrt(self, x: jax.Array) -> jax.Array:
        """See `Arithmetic`."""
        return instructions.sqrt(x, _LAYOUT) if self._approximates else super().sqrt(x)

    def divide(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """See `Arithmetic`."""
        if not self._approximates:
            return super().divide(x, y)
        return x * instructions.reciprocal(y, _LAYOUT)

    def total(self, value: jax.Array) -> jax.Array:
        """See `Tile`."""
        return jnp.sum(value)


def run(
    one_pass: Pass,
    rule: Rule,
    numbers: jax.Array,
    given: Mapping[str, jax.Array],
    changed: Mapping[str, jax.Array],
    made: tuple[str, ...] = (),
    *,
    interpret: Any = None,
) -> dict[str, jax.Array]:
    """Run a pass over a bucket, as `reference.run` does, in the memory of `changed`."""
    num_tiles = {**given, **changed}["params"].size // TILE
    names = ("numbers", *given, *changed, *made)

    def program(*refs: Any) -> None:
        by_name = dict(zip(names, refs, strict=True))

        @pl.when(by_name["numbers"][APPLIED] > 0)
        def _() -> None:
            one_pass(OneTile(by_name, interprets=interpret is not None), rule)

    def in_tiles(array: jax.Array) -> jax.Array:
        """One tile per row: element indices may need more than 32 bits."""
        return array if array.shape == (num_tiles,) else array.reshape(num_tiles, TILE)

    own = {name: jax.new_ref(in_tiles(array)) for name, array in changed.items()}
    kernel = plgpu.kernel(
        program,
        out_type=[jax.ShapeDtypeStruct((num_tiles,), jnp.float32) for _ in made],
        grid=(num_tiles,),
        grid_names=("tile",),
        kernel_name=f"fused_{type(rule).__name__.lower()}_{one_pass.__name__}",
        compiler_params=plgpu.CompilerParams(
            # A thread writes what it alone has read; but a scale is read by all, and
            # then written by one: the maximum that is written has barriers of its own.
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret if interpret is not None else False,
    )
    found = kernel(numbers, *map(in_tiles, given.values()), *own.values())
    kept = {name: jax.freeze(ref).reshape(-1) for name, ref in own.items()}
    return kept | dict(zip(made, found, strict=True))
