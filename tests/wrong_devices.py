"""A device that computes a wrong result, in an engine's steps or their replays."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

import jaxpar
from jaxpar.tree import named_leaves

Change = Callable[[np.ndarray], None]
"""Alters one device's shard in place."""


def flip(shard: np.ndarray) -> None:
    """Flip the lowest bit of the last element."""
    shard.reshape(-1).view(np.uint8)[-shard.itemsize] ^= 1


def scale(factor: float) -> Change:
    """Multiply a shard."""

    def change(shard: np.ndarray) -> None:
        shard *= np.float32(factor)

    return change


def altered(array: jax.Array, device: int, change: Change) -> jax.Array:
    """An array with another shard on one device, if it is this process's."""
    kind = array.sharding.memory_kind
    shards = [np.array(s.data, copy=True) for s in array.addressable_shards]
    devices = [s.device for s in array.addressable_shards]
    for shard, own in zip(shards, devices, strict=True):
        if own.id == device:
            change(shard)
    placed = [
        jax.device_put(shard, SingleDeviceSharding(own, memory_kind=kind))
        for shard, own in zip(shards, devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)


@contextmanager
def faulty_result(
    engine: jaxpar.Engine, run: int, leaf: str, device: int, change: Change = flip
) -> Iterator[None]:
    """A device alters its shard of a leaf of what a run returns.

    Args:
      engine: the engine.
      run: 0 for the step, 1 and 2 for its replays.
      leaf: the leaf's name.
      device: its number.
      change: what it does.
    """
    number = list(named_leaves(engine.placement.packed_shardings)).index(leaf)

    def after(stepped: Any, leaves: list, batch: Any) -> Any:
        new, *rest = stepped(leaves, batch)
        new[number] = altered(new[number], device, change)
        return new, *rest

    with _around(engine, run, after):
        yield


@contextmanager
def faulty_rows(
    engine: jaxpar.Engine, run: int, name: str, device: int, change: Change
) -> Iterator[None]:
    """A device alters its rows of what a run takes: collectives spread the error."""

    def before(stepped: Any, leaves: list, batch: Any) -> Any:
        changed = {**batch, name: altered(batch[name], device, change)}
        return stepped(leaves, changed)

    with _around(engine, run, before):
        yield


@contextmanager
def _around(engine: jaxpar.Engine, run: int, function: Any) -> Iterator[None]:
    replays = engine.replays()
    if run:
        replays._shifted(run)
    with ExitStack() as stack:
        for own in replays._runs[run]._losses.values():
            stepped = own.stepped

            def wrong(leaves: list, batch: Any, stepped: Any = stepped) -> Any:
                return function(stepped, leaves, batch)

            stack.enter_context(mock.patch.object(own, "stepped", wrong))
        yield
