"""How does a scan run over layers that are gathered one by one, the next one ahead?"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


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
        return layers.gather(_at(shards, place(turn)))

    def run(turn: Any, carry: Any, layer: list) -> tuple[Any, list]:
        carry, ys = step(carry, layer, _at(xs, place(turn)))
        data, kinds["ys"] = _data_of(ys)
        spaces["ys"] = [jax.typeof(x).memory_space for x in data]
        return carry, data

    def ahead(turn: Any, state: tuple) -> tuple:
        carry, layer, stacks = state
        following = gathered(jnp.minimum(turn + 1, count - 1))
        carry, data = run(turn, carry, layer)
        return carry, following, _written(stacks, data, place(turn))

    kinds: dict[str, tuple] = {}
    spaces: dict[str, list] = {}
    first: list = gathered(0) if layer is None else layer
    _, slices = jax.eval_shape(run, 0, carry, first)
    pairs = enumerate(zip(slices, spaces["ys"], strict=True))
    stacks = [
        _empty((count, *x.shape), x.dtype, space, number)
        for number, (x, space) in pairs
    ]
    turns = count if again else count - 1
    how = {"unroll": min(layers.unroll, turns)}
    state = jax.lax.fori_loop(0, turns, ahead, (carry, first, stacks), **how)
    carry, last, stacks = state
    if again:
        return carry, _from_data(stacks, *kinds["ys"]), last
    # The last iteration runs after the loop, where nothing is gathered ahead.
    carry, data = run(turns, carry, last)
    stacks = _written(stacks, data, place(turns))
    return carry, _from_data(stacks, *kinds["ys"]), None


def _empty(shape: tuple[int, ...], dtype: Any, space: Any, number: int) -> jax.Array:
    """A stack to write slices into, where they are: offloaded ones are on the host.

    There stacks differ in what they are filled with. XLA would merge equal ones, and
    copy them apart in the host's memory.
    """
    if space == jax.memory.Space.Device:
        return jnp.zeros(shape, dtype)
    return jax.device_put(jnp.full(shape, number, dtype), space)


def _at(stacks: Any, index: Any) -> Any:
    """A slice of every stack."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), stacks
    )


def _written(stacks: list, slices: list, index: Any) -> list:
    """Stacks with one slice replaced."""
    return [
        jax.lax.dynamic_update_index_in_dim(stack, part, index, 0)
        for stack, part in zip(stacks, slices, strict=True)
    ]


def _data_of(tree: Any) -> tuple[list, tuple]:
    """Arrays, of keys their data; and what `_from_data` needs to undo it."""
    leaves, structure = jax.tree.flatten(tree)
    kinds = [jax.random.key_impl(x) if _is_key(x) else None for x in leaves]
    pairs = zip(leaves, kinds, strict=True)
    data = [x if kind is None else jax.random.key_data(x) for x, kind in pairs]
    return data, (structure, kinds)


def _from_data(data: list, structure: Any, kinds: list) -> Any:
    pairs = zip(data, kinds, strict=True)
    leaves = [
        x if kind is None else jax.random.wrap_key_data(x, impl=kind)
        for x, kind in pairs
    ]
    return jax.tree.unflatten(structure, leaves)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
