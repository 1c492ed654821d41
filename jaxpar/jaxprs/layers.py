"""How does a scan run over layers that are gathered one by one, the next one ahead?"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.jaxprs.stacks import at, data_of, empty, from_data, written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """Layers that a loop gathers.

    Attributes:
      gather: a layer's shards -> its parameters.
      length: the number of layers.
      reverse: whether the last layer is first.
      unroll: iterations of the scan that are compiled as one.
      ahead: whether the next layer is gathered while one computes.
    """

    gather: Callable[[Sequence[Any]], list]
    length: int
    reverse: bool = False
    unroll: int = 1
    ahead: bool = False


def iterate(
    layers: Layers,
    shards: Sequence[Any],
    step: Callable[..., tuple[Any, Any]],
    carry: Any,
    xs: Any,
    *,
    backward: bool = False,
    layer: list | None = None,
    again: bool = False,
) -> tuple[Any, Any, list | None]:
    """Scan ``step(carry, layer, xs) -> (carry, ys)`` over the layers.

    Args:
      layers: how they are gathered.
      shards: the stacks of shards.
      step: an iteration.
      carry: what the first is given.
      xs: stacks.
      backward: whether the last layer of the loop is the first here.
      layer: the first layer, if it has been gathered.
      again: whether to gather the last layer once more while it computes.

    Returns:
      What the last iteration returned; the stacks; and the last layer, if it was
      gathered `again`.
    """
    count, reverse = layers.length, layers.reverse != backward

    def at_once(carry: Any, each: tuple) -> tuple[Any, Any]:
        own, x = each
        return step(carry, layers.gather(own), x)

    if not layers.ahead or count == 1:
        given = list(shards), xs
        how = {"length": count, "reverse": reverse, "unroll": layers.unroll}
        return (*jax.lax.scan(at_once, carry, given, **how), None)

    def place(turn: Any) -> Any:
        return count - 1 - turn if reverse else turn

    def gathered(turn: Any) -> list:
        return layers.gather(at(shards, place(turn)))

    def run(turn: Any, carry: Any, layer: list) -> tuple[Any, list]:
        carry, ys = step(carry, layer, at(xs, place(turn)))
        data, kinds["ys"] = data_of(ys)
        spaces["ys"] = [jax.typeof(x).memory_space for x in data]
        return carry, data

    def ahead(turn: Any, state: tuple) -> tuple:
        carry, layer, stacks = state
        following = gathered(jnp.minimum(turn + 1, count - 1))
        carry, data = run(turn, carry, layer)
        return carry, following, written(stacks, data, place(turn))

    kinds: dict[str, tuple] = {}
    spaces: dict[str, list] = {}
    first: list = gathered(0) if layer is None else layer
    _, slices = jax.eval_shape(run, 0, carry, first)
    pairs = enumerate(zip(slices, spaces["ys"], strict=True))
    stacks = [
        empty((count, *x.shape), x.dtype, space, number) for number, (x, space) in pairs
    ]
    turns = count if again else count - 1
    how = {"unroll": min(layers.unroll, turns)}
    state = jax.lax.fori_loop(0, turns, ahead, (carry, first, stacks), **how)
    carry, last, stacks = state
    if again:
        return carry, from_data(stacks, *kinds["ys"]), last
    # The last iteration runs after the loop, where nothing is gathered ahead.
    carry, data = run(turns, carry, last)
    stacks = written(stacks, data, place(turns))
    return carry, from_data(stacks, *kinds["ys"]), None
