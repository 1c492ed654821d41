"""The same passes in plain JAX, on all tiles at once."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.fused_optimizers.rules import Exact, Rule
from kernels_pallas.fused_optimizers.tiles import APPLIED, TILE, Tile

Pass = Callable[[Tile, Rule], None]


class AllTiles(Exact):
    """A bucket's operands as [tiles, TILE], and the values written to them.

    Args:
      given: operands by name, [elements] or [tiles].
      numbers: of the step.
    """

    def __init__(self, given: Mapping[str, jax.Array], numbers: jax.Array):
        self._given, self._numbers = given, numbers
        self.written: dict[str, jax.Array] = {}

    def read(self, name: str) -> jax.Array:
        """See `Tile`."""
        return self._given[name].reshape(-1, TILE)

    def write(self, name: str, value: jax.Array) -> None:
        """See `Tile`."""
        self.written[name] = value.reshape(-1).astype(self._given[name].dtype)

    def read_one(self, name: str) -> jax.Array:
        """See `Tile`."""
        return self._given[name][:, None]

    def write_one(self, name: str, value: jax.Array) -> None:
        """See `Tile`."""
        self.written[name] = value[:, 0]

    def number(self, place: int) -> jax.Array:
        """See `Tile`."""
        return self._numbers[place]

    def has(self, name: str) -> bool:
        """See `Tile`."""
        return name in self._given

    def largest(self, value: jax.Array) -> jax.Array:
        """See `Tile`."""
        return jnp.max(value, axis=1, keepdims=True)

    def total(self, value: jax.Array) -> jax.Array:
        """See `Tile`."""
        return jnp.sum(value, axis=1, keepdims=True)


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
    """Run a pass over a bucket.

    Args:
      one_pass: a function of `tiles`.
      rule: the optimizer.
      numbers: of the step, in fp32.
      given: operands that are read; by name, [elements] or [tiles].
      changed: operands that are updated, likewise.
      made: names of numbers that the pass computes for each tile.
      interpret: for the kernels, how to run without a GPU.

    Returns:
      The updated and computed operands, by name. If the step is not applied, the
      updated ones are unchanged, and the computed ones must not be used.
    """
    del interpret
    tiles = AllTiles({**given, **changed}, numbers)
    one_pass(tiles, rule)
    is_applied = numbers[APPLIED] > 0
    kept = {
        name: jnp.where(is_applied, tiles.written.get(name, old), old)
        for name, old in changed.items()
    }
    if "copies" in kept:
        # Rounded from the stored value, bit for bit, and not from a recomputed sum.
        kept["params"] = jax.lax.optimization_barrier(kept["params"])
        kept["copies"] = kept["params"].astype(kept["copies"].dtype)
    return kept | {name: tiles.written[name] for name in made}
