"""How are random numbers made independent of the mesh: a shard draws its own rows.

Partitionable threefry hashes a key and an element's position. So a data shard can draw
the same numbers for its rows as one device would: it uses the same key, and positions
in the array of all rows. The dim that counts rows is found by tracing at two batch
sizes. A draw without such a dim is the same on all shards. Where the dim can't be
proved, the shard's number is folded into the key.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.random import threefry2x32_p

from jaxpar.jaxprs.draws import Draw, Path, find_draws, redrawn
from jaxpar.jaxprs.evaluate import bind, shape_of
from jaxpar.types import Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardKey:
    """A key that all data shards share, and the shard's number.

    Attributes:
      key: of the step, or of one of its micro-batches.
      shard: int32 scalar, from 0.
      step_key: the step's key; None if that is `key`.
      microbatch: its number, an int32 scalar; None for the step.
    """

    key: Leaf
    shard: Leaf
    step_key: Leaf | None = None
    microbatch: Leaf | None = None

    def fold_in(self, number: jax.Array | int) -> "ShardKey":
        """The key of a micro-batch."""
        own = jax.random.fold_in(self.key, number)
        return ShardKey(own, self.shard, self.key, jnp.int32(number))


@runtime_checkable
class Draws(Protocol):
    """How a loss function's random numbers are drawn."""

    def call(
        self, fn: Callable[..., Any], key: ShardKey, args: tuple, rows: "BatchRows"
    ) -> Any:
        """Call ``fn(key, *args)``, a pure function of arrays.

        Args:
          fn: takes a key, and `args`.
          key: the micro-batch's.
          args: pytrees of arrays.
          rows: the rows of `args`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class BatchRows:
    """The number of rows of some arguments, and their shapes with twice as many rows.

    Attributes:
      count: rows of this shard's micro-batch.
      twice: returns the shapes of `args` with 2 x `count` rows.
    """

    count: int
    twice: Callable[[], tuple]


@dataclasses.dataclass(frozen=True)
class AsTraced:
    """Leave the draws as traced: for all rows at once, or for shapes only."""

    def call(
        self, fn: Callable[..., Any], key: ShardKey, args: tuple, rows: BatchRows
    ) -> Any:
        """See `Draws`."""
        del rows
        return fn(key.key, *args)


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """Draw the numbers that one device would draw for this shard's rows.

    Attributes:
      num_shards: data shards.
    """

    num_shards: int

    def call(
        self, fn: Callable[..., Any], key: ShardKey, args: tuple, rows: BatchRows
    ) -> Any:
        """See `Draws`."""
        closed, shapes = traced(fn, key.key, args)
        draws = find_draws(closed.jaxpr)
        if not draws:
            return fn(key.key, *args)
        dims = row_dims(draws, fn, key.key, rows)
        own = key.key if dims else jax.random.fold_in(key.key, key.shard)

        def rule(draw: Draw, ins: Sequence[Any]) -> Sequence[Any] | None:
            dim = dims[draw.path] if dims else None
            if dim is None:
                return None
            if dim is UNPROVED:
                return _per_shard(draw, ins, key.shard)
            first = key.shard * draw.shape[dim]
            return [_own(draw, ins[0], OfAll(dim, first, 1, self.num_shards))]

        outs = redrawn(closed, jax.tree.leaves((own, args)), rule)
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)


SIZE_ERRORS = (TypeError, ValueError, AssertionError, LookupError, RuntimeError)
"""Errors of a function with a hard-coded number of rows, called with another."""

_OF_KEYS = ("random_split", "random_fold_in")
"""Draws that derive keys; all others draw numbers."""

UNPROVED = -1
"""A draw's row dim where it can't be proved."""


@dataclasses.dataclass(frozen=True)
class OfAll:
    """Which rows of the array of all rows an array holds.

    Attributes:
      dim: the dim that counts rows.
      first: the first row's number, an int32 scalar.
      stride: from one row's number to the next row's.
      times: rows of the full array for each row of this one.
    """

    dim: int
    first: Leaf
    stride: int
    times: int


def _own(draw: Draw, key: jax.Array, of_all: OfAll) -> jax.Array:
    """This shard's rows of a draw of all rows."""
    draw_one = functools.partial(
        own_bits if _has_bits(draw) else own_keys, shape=draw.shape, of_all=of_all
    )
    for _ in range(key.ndim):
        draw_one = jax.vmap(draw_one)
    out, dtype = draw_one(key), shape_of(draw.eqn.outvars[0]).dtype
    return out.astype(dtype) if _has_bits(draw) else out


def traced(
    fn: Callable[..., Any], key: Any, args: tuple
) -> tuple[core.ClosedJaxpr, Any]:
    """The jaxpr of ``fn(key, *args)``, and the shapes of its result."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), (key, *args)
    )
    return jax.make_jaxpr(fn, return_shape=True)(*shapes)


def row_dims(
    draws: Sequence[Draw], fn: Callable[..., Any], key: Any, rows: BatchRows
) -> dict[Path, int | None]:
    """Find the dim of each draw that counts rows.

    Args:
      draws: of `fn` on `rows`.
      fn: as in `Draws.call`.
      key: a key, or its shape.
      rows: the rows.

    Returns:
      path -> the dim, None for a draw without one, or `UNPROVED`. Empty if no draw can
      be proved: the function can't be traced at twice the rows, draws differently then,
      or has draws that can't be replaced.
    """
    if not draws or any(draw.is_hidden for draw in draws):
        return {}
    try:
        wide, _ = traced(fn, key, rows.twice())
    except SIZE_ERRORS:
        return {}
    others = find_draws(wide.jaxpr)
    # Not by position: with one row JAX leaves out some operations.
    if [_kind(draw) for draw in draws] != [_kind(draw) for draw in others]:
        return {}
    return {
        one.path: _row_dim(one, other, rows.count)
        for one, other in zip(draws, others, strict=True)
    }


def _kind(draw: Draw) -> tuple[str, int]:
    return draw.eqn.primitive.name, len(draw.path)


def random_notes(
    draws: Sequence[Draw], dims: dict[Path, int | None]
) -> tuple[str, ...]:
    """Report which draws depend on the mesh, a line each.

    Args:
      draws: of a function.
      dims: by `row_dims`.
    """
    if not draws:
        return ()
    if not dims:
        return (
            "random: the row dim of no draw can be proved, so all random numbers "
            "depend on the data axis: the loss can't be traced at twice the rows, "
            "draws differently then, or draws inside a custom derivative.",
        )
    unproved = [draw for draw in draws if dims[draw.path] is UNPROVED]
    if not unproved:
        return (
            "random: each data shard draws its own rows of the array of all rows, as "
            "one device would.",
        )
    return tuple(
        f"random: {draw.eqn.primitive.name} of shape {draw.shape} {draw.where} "
        "depends on the data axis, because its row dim can't be proved"
        + ("." if is_keyed(draw) else "; every shard draws the same numbers.")
        for draw in unproved
    )


def _row_dim(draw: Draw, wide: Draw, count: int) -> int | None:
    """The dim of a draw that has `count` elements, and twice that at twice the rows."""
    if len(draw.shape) != len(wide.shape) or draw.lengths != wide.lengths:
        return UNPROVED  # A scan over rows draws once an iteration.
    sizes = list(zip(draw.shape, wide.shape, strict=True))
    grown = [dim for dim, (one, other) in enumerate(sizes) if one != other]
    if not grown:
        return None
    can_draw = draw.is_threefry and jax.config.jax_threefry_partitionable
    is_whole = draw.eqn.primitive.name in ("random_bits", "random_split")
    if len(grown) == 1 and sizes[grown[0]] == (count, 2 * count):
        wide_bits = _has_bits(draw) and draw.eqn.params["bit_width"] == 64
        if can_draw and is_whole and not wide_bits:
            return grown[0]
    return UNPROVED


def _has_bits(draw: Draw) -> bool:
    return draw.eqn.primitive.name == "random_bits"


def _per_shard(draw: Draw, ins: Sequence[Any], shard: jax.Array) -> Sequence[Any]:
    """Draw with the shard's number folded into the key (or into derived keys)."""

    def fold(key: jax.Array) -> jax.Array:
        folded = functools.partial(jax.random.fold_in, data=shard)
        for _ in range(key.ndim):
            folded = jax.vmap(folded)
        return folded(key)

    if draw.eqn.primitive.name == "random_fold_in":
        return [fold(key) for key in bind(draw.eqn, ins)]
    return bind(draw.eqn, [fold(ins[0]), *ins[1:]] if is_keyed(draw) else list(ins))


def is_keyed(draw: Draw) -> bool:
    """Whether it draws from a key, not from a generator's raw state."""
    return jnp.issubdtype(shape_of(draw.eqn.invars[0]).dtype, jax.dtypes.prng_key)


def own_bits(key: jax.Array, *, shape: tuple[int, ...], of_all: OfAll) -> jax.Array:
    """Some rows of ``jax.random.bits(key, all_rows)``, by threefry.

    Returns:
      uint32 of `shape`, the shape of these rows; narrower dtypes use the lower bits.
    """
    one, other = _hashed(key, shape, of_all)
    return one ^ other


def own_keys(key: jax.Array, *, shape: tuple[int, ...], of_all: OfAll) -> jax.Array:
    """Some rows of ``jax.random.split(key, all_rows)``; as `own_bits`."""
    data = jnp.stack(_hashed(key, shape, of_all), axis=-1)
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def _hashed(key: jax.Array, shape: tuple[int, ...], of_all: OfAll) -> list[jax.Array]:
    # Scalars: XLA:CPU carries broadcast keys through the loop of rounds.
    k1, k2 = jax.random.key_data(key)
    return threefry2x32_p.bind(k1, k2, *_positions(shape, of_all))


def _positions(shape: tuple[int, ...], of_all: OfAll) -> tuple[jax.Array, jax.Array]:
    """Each element's position in the array of all rows, as two 32-bit words."""
    dim = of_all.dim
    whole = [size * of_all.times if i == dim else size for i, size in enumerate(shape)]
    is_small = math.prod(whole) <= 2**32
    high = low = jnp.zeros(shape, jnp.uint32)
    for i, size in enumerate(shape):
        stride = math.prod(whole[i + 1 :])
        index = jnp.arange(size, dtype=jnp.uint32)
        if i == dim:
            first = jnp.asarray(of_all.first).astype(jnp.uint32)
            index = first + index * jnp.uint32(of_all.stride)
        index = jnp.expand_dims(index, [j for j in range(len(shape)) if j != i])
        added = index * jnp.uint32(stride % 2**32)
        low = low + added
        if not is_small:
            carried = (low < added).astype(jnp.uint32)
            high = high + carried + _product_high(index, stride)
    return high, low


def _product_high(index: jax.Array, stride: int) -> jax.Array:
    """The upper 32 bits of ``index * stride``, modulo 2^64."""
    low, high = stride % 2**32, stride // 2**32
    half = jnp.uint32(0xFFFF)
    a_low, a_high = index & half, index >> 16
    b_low, b_high = jnp.uint32(low & 0xFFFF), jnp.uint32(low >> 16)
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    other = a_low * b_high + (middle & half)
    upper = a_high * b_high + (middle >> 16) + (other >> 16)
    return upper + index * jnp.uint32(high % 2**32)


@dataclasses.dataclass(frozen=True)
class OfParts:
    """Draw the same numbers for each row, for any number of micro-batches.

    They are the numbers of the step's key for one micro-batch of all rows. Where a
    row dim can't be proved all draws are constant instead: a uniform one is 1/16 (which
    dropout keeps), a normal one -1.5.

    Attributes:
      parts: micro-batches; the rows of one are `parts` apart.
      num_shards: data shards.
      constant: whether all draws are constant, proved or not.
      record: called, for a function that draws numbers, with whether all are proved.
    """

    parts: int
    num_shards: int
    constant: bool
    record: Callable[[bool], None]

    def call(
        self, fn: Callable[..., Any], key: ShardKey, args: tuple, rows: BatchRows
    ) -> Any:
        """See `Draws`."""
        step_key = key.key if key.step_key is None else key.step_key
        closed, shapes = traced(fn, step_key, args)
        draws = find_draws(closed.jaxpr)
        dims = {} if self.constant else row_dims(draws, fn, step_key, rows)
        are_proved = bool(dims) and UNPROVED not in dims.values()
        if any(draw.eqn.primitive.name not in _OF_KEYS for draw in draws):
            self.record(are_proved)
        part = jnp.int32(0) if key.microbatch is None else key.microbatch

        def rule(draw: Draw, ins: Sequence[Any]) -> Sequence[Any] | None:
            dim = dims[draw.path] if are_proved else None
            if dim is not None:
                first = key.shard * (draw.shape[dim] * self.parts) + part
                times = self.parts * self.num_shards
                return [_own(draw, ins[0], OfAll(dim, first, self.parts, times))]
            return None if are_proved else _constant(draw, ins)

        outs = redrawn(closed, jax.tree.leaves((step_key, args)), rule)
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def _constant(draw: Draw, ins: Sequence[Any]) -> Sequence[Any] | None:
    """A constant for a draw of numbers; None for keys, which are not replaced."""
    name, out = draw.eqn.primitive.name, shape_of(draw.eqn.outvars[-1])
    if name == "random_gamma":  # 1, or its logarithm.
        value = 0.0 if draw.eqn.params["log_space"] else 1.0
        return [jnp.full(out.shape, value, out.dtype)]
    if name not in ("random_bits", "rng_bit_generator"):
        return None
    width = 8 * out.dtype.itemsize
    bits = jnp.full(out.shape, 1 << (width - 4), out.dtype)
    return [*ins[: len(draw.eqn.outvars) - 1], bits]


def can_be_of_parts(draws: Sequence[Draw]) -> bool:
    """Whether `OfParts` can replace all draws; constants never end a rejection loop."""
    return not any(draw.is_hidden or draw.is_in_while for draw in draws)
