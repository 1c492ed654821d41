"""How does a loop run over some of its layers alone, chosen when the program runs?

The numbers of the layers that run stand in a list before the loop begins, so the next
one is known, and can be gathered while one computes. The others are not looked at: they
are not gathered, and their slices of the stacks stay what they were.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.jaxprs.branches import expected_turns
from jaxpar.jaxprs.layers import Layers
from jaxpar.jaxprs.stacks import at, data_of, empty, from_data, written
from jaxpar.types import Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen:
    """The layers that a loop runs.

    Attributes:
      order: int32 [length]: their numbers, rising, before those of the others.
      count: how many they are, int32.
      mean: how many they are on average.
    """

    order: Leaf
    count: Leaf
    mean: float = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, flags: jax.Array, fraction: float) -> "Chosen":
        """Those whose flag, of [length], is set; on average, a fraction."""
        order = jnp.argsort(jnp.logical_not(flags), stable=True)
        count = flags.sum(dtype=jnp.int32)
        return cls(order.astype(jnp.int32), count, fraction * flags.size)


def iterate_chosen(
    layers: Layers,
    chosen: Chosen,
    shards: Sequence[Any],
    step: Callable[..., tuple[Any, Any]],
    carry: Any,
    xs: Any,
    *,
    starts: Mapping[int, jax.Array],
    backward: bool = False,
    layer: list | None = None,
    again: bool = False,
) -> tuple[Any, Any, list | None]:
    """Run ``step(carry, layer, xs) -> (carry, ys)`` over the chosen layers.

    Args:
      layers: how they are gathered; the loop is not unrolled.
      chosen: which.
      shards: as for `jaxpar.jaxprs.layers.iterate`.
      step: likewise.
      carry: likewise.
      xs: likewise.
      starts: number of a stack that is returned -> what it holds of layers that do not
        run; 0 for the others.
      backward: as for `iterate`.
      layer: likewise.
      again: likewise.

    Returns:
      As `iterate`.
    """
    reverse, count, turns = layers.reverse != backward, chosen.count, chosen.mean
    kinds: dict[str, Any] = {}

    def place(turn: Any) -> jax.Array:
        return at(chosen.order, count - 1 - turn if reverse else turn)

    def gathered(turn: Any) -> list:
        return layers.gather(at(shards, place(turn)))

    def run(turn: Any, carry: Any, layer: list) -> tuple[Any, list]:
        carry, ys = step(carry, layer, at(xs, place(turn)))
        data, kinds["ys"] = data_of(ys)
        kinds["spaces"] = [jax.typeof(x).memory_space for x in data]
        return carry, data

    def onward(turn: Any, state: tuple, layer: list) -> tuple:
        carry, stacks = state
        carry, data = run(turn, carry, layer)
        return carry, written(stacks, data, place(turn))

    def at_once(turn: Any, state: tuple) -> tuple:
        return onward(turn, state, gathered(turn))

    def ahead(turn: Any, state: tuple) -> tuple:
        state, layer = state
        following = gathered(jnp.minimum(turn + 1, count - 1))
        return onward(turn, state, layer), following

    # Without any, the first layer is gathered in vain.
    first = gathered(0) if layers.ahead and layer is None else layer
    like = first if layers.ahead else jax.eval_shape(gathered, 0)
    _, slices = jax.eval_shape(run, 0, carry, like)
    state = carry, _stacks(layers.length, slices, kinds["spaces"], starts)
    if not layers.ahead:
        carry, stacks = _repeat(0, count, at_once, state, turns)
        return carry, from_data(stacks, *kinds["ys"]), None
    # The last turn is a loop of its own, where nothing is gathered ahead.
    end = count if again else jnp.maximum(count - 1, 0)
    given = state, first
    state, last = _repeat(0, end, ahead, given, turns if again else turns - 1)
    if not again:
        state = _repeat(
            end, count, lambda turn, own: onward(turn, own, last), state, 1.0
        )
    carry, stacks = state
    return carry, from_data(stacks, *kinds["ys"]), last if again else None


def _repeat(
    first: Any, end: Any, body: Callable[[Any, Any], Any], state: Any, turns: float
) -> Any:
    with expected_turns(max(turns, 0.0)):
        return jax.lax.fori_loop(first, end, body, state)


def _stacks(
    length: int,
    slices: Sequence[Any],
    spaces: Sequence[Any],
    starts: Mapping[int, jax.Array],
) -> list[jax.Array]:
    """What the stacks hold before the loop."""
    given = {number: data_of(stack)[0][0] for number, stack in starts.items()}
    pairs = enumerate(zip(slices, spaces, strict=True))
    return [
        given[number]
        if number in given
        else empty((length, *x.shape), x.dtype, space, 0)
        for number, (x, space) in pairs
    ]
