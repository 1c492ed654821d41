"""What is computed on a tile of a bucket, in which order: one source for all devices.

A program of the kernel has one tile in registers; plain JAX computes all tiles at once.
`Tile` is the interface through which both read and write.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from kernels_pallas.fused_optimizers.codes import ROOTS, SIGNED, Code
from kernels_pallas.fused_optimizers.rules import Arithmetic, Moments, Rule

TILE = 1024
"""Elements that share the scale of their codes, and belong to one leaf."""

APPLIED, FACTOR, RATE, CORRECTIONS = 0, 1, 2, 3
"""Indices of a step's numbers."""

SQUARES = ("squares_of_params", "squares_of_direction")
"""Sums that the first pass computes for each tile."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A moment in 8 bits.

    Attributes:
      codes: int8, or uint8 of the roots of a moment without sign; [elements].
      scales: the largest of each tile; fp32, [tiles].
    """

    codes: Any
    scales: Any


@runtime_checkable
class Tile(Arithmetic, Protocol):
    """One tile, or all of them."""

    def read(self, name: str) -> jax.Array:
        """An operand's elements, in its dtype."""
        ...

    def write(self, name: str, value: jax.Array) -> None:
        """Replace an operand's elements; rounded to its dtype."""
        ...

    def read_one(self, name: str) -> Any:
        """An operand's number for the tile."""
        ...

    def write_one(self, name: str, value: Any) -> None:
        """Replace an operand's number for the tile."""
        ...

    def number(self, place: int) -> Any:
        """A number of the step."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is such an operand."""
        ...

    def largest(self, value: jax.Array) -> Any:
        """The maximum over the tile."""
        ...

    def total(self, value: jax.Array) -> Any:
        """The sum over the tile."""
        ...


def step(tile: Tile, rule: Rule) -> None:
    """Run a full step in one pass."""
    before, after, _, grads = _advanced(tile, rule)
    params = tile.read("params")
    direction = _direction(tile, rule, params, grads, before, after)
    _write_params(tile, params, tile.number(RATE) * direction)


def advance(tile: Tile, rule: Rule) -> None:
    """Run the first pass of a step with trust ratios: moments, and sums of squares.

    The squares of the direction are those of `descend`, from the moments as stored.
    """
    before, _, kept, grads = _advanced(tile, rule)
    params = tile.read("params")
    direction = _direction(tile, rule, params, grads, before, kept)
    for name, value in zip(SQUARES, (params, direction), strict=True):
        tile.write_one(name, tile.total(value * value))


def descend(tile: Tile, rule: Rule) -> None:
    """Run the second pass: update the parameters, by each leaf's ratio."""
    after = {name: _read_moment(tile, name) for name in rule.moments}
    params = tile.read("params")
    direction = _direction(tile, rule, params, None, {}, after)
    length = tile.number(RATE) * tile.read_one("ratios")
    _write_params(tile, params, length * direction)


def code_of(name: str) -> Code:
    """The code of a moment."""
    return ROOTS if name == "nu" else SIGNED


def as_coded(name: str, value: jax.Array, arithmetic: Arithmetic) -> jax.Array:
    """The encoded form of a moment: itself, or the root of one without sign."""
    return arithmetic.sqrt(value) if code_of(name) is ROOTS else value


def from_coded(name: str, value: jax.Array) -> jax.Array:
    """Undo `as_coded`."""
    return value * value if code_of(name) is ROOTS else value


def _advanced(tile: Tile, rule: Rule) -> tuple[Moments, Moments, Moments, jax.Array]:
    """Moments before, after, and as stored (they are written); gradients."""
    grads = tile.read("grads").astype(jnp.float32) * tile.number(FACTOR)
    before = {name: _read_moment(tile, name) for name in rule.moments}
    after = rule.advance(grads, before)
    kept = {name: _write_moment(tile, name, value) for name, value in after.items()}
    return before, after, kept, grads


def _direction(
    tile: Tile,
    rule: Rule,
    params: jax.Array,
    grads: jax.Array | None,
    before: Moments,
    after: Moments,
) -> jax.Array:
    corrections = [tile.number(CORRECTIONS + i) for i in range(rule.num_corrections)]
    down = rule.direction(grads, before, after, corrections, tile)
    return down + tile.read_one("decays") * params


def _write_params(tile: Tile, params: jax.Array, step: jax.Array) -> None:
    params = params - step
    tile.write("params", params)
    if tile.has("copies"):
        tile.write("copies", params)


def _read_moment(tile: Tile, name: str) -> jax.Array:
    if tile.has(name):
        return tile.read(name)
    codes, scale = tile.read(f"{name}/codes"), tile.read_one(f"{name}/scales")
    return from_coded(name, code_of(name).decode(codes, scale))


def _write_moment(tile: Tile, name: str, value: jax.Array) -> jax.Array:
    """Write a moment; returns the value that will be read."""
    if tile.has(name):
        tile.write(name, value)
        return value
    coded = as_coded(name, value, tile)
    scale = tile.largest(jnp.abs(coded))
    tile.write_one(f"{name}/scales", scale)
    codes = code_of(name).encode(coded, scale)
    tile.write(f"{name}/codes", codes)
    return from_coded(name, code_of(name).decode(codes, scale))
