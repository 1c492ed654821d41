"""Which files hold the part of the state that is on disk, and what is where in them?

A version of the state is a folder, with a file for each leaf and each shard of it that
this process has: the master and the moments, one after the other. JAX sees them through
maps of the files, as arrays on the host's CPU, which are read as they are used.
"""

import dataclasses
import functools
import math
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpar.offload.direct_io import ALIGN, aligned_buffer, padded, write
from jaxpar.offload.on_disk import OnDisk
from jaxpar.offload.rest import by_index, indices_of

_CHUNK = 8 << 20
"""Bytes that are written at a time."""


@dataclasses.dataclass(frozen=True)
class LocalShard:
    """A shard of a leaf that some of this process's devices have.

    Attributes:
      number: among the leaf's distinct shards here.
      index: which part of the leaf it is, as text.
      devices: that have it.
      shape: of an array of it.
    """

    number: int
    index: str
    devices: tuple[Any, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class LeafOnDisk:
    """The arrays of a parameter that are on disk, sharded alike.

    Attributes:
      number: of the leaf, in its files' names.
      name: the parameter's.
      arrays: the master and the moments.
      sharding: theirs.
      copy: the parameter in the compute dtype, if it is on disk too: `put` and each
        update write it beside the master.
    """

    number: int
    name: str
    arrays: tuple[OnDisk, ...]
    sharding: NamedSharding
    copy: OnDisk | None = None

    @property
    def stored(self) -> tuple[OnDisk, ...]:
        """All arrays of a file, in order."""
        return self.arrays if self.copy is None else (*self.arrays, self.copy)

    @functools.cached_property
    def shards(self) -> tuple[LocalShard, ...]:
        """Those of this process's devices."""
        shape, place = self.arrays[0].shape, self.sharding
        return tuple(
            LocalShard(number, index, tuple(devices), place.shard_shape(shape))
            for number, (index, devices) in enumerate(indices_of(place, shape).items())
        )

    def file(self, version: Path, shard: LocalShard) -> Path:
        """Where a shard of a version is."""
        return version / f"{self.number:04d}-{shard.number:02d}.bin"

    def offset(self, shard: LocalShard, array: int) -> int:
        """Where one of the arrays begins in the file; a multiple of `ALIGN`."""
        before = self.stored[:array]
        return sum(padded(shard.elements * x.dtype.itemsize) for x in before)

    def num_bytes(self, shard: LocalShard) -> int:
        """The size of the file."""
        return self.offset(shard, len(self.stored))

    def put(self, version: Path, array: int, value: jax.Array) -> None:
        """Write one of the arrays, from memory; with a master its copy."""
        numbers = [array] if array or self.copy is None else [0, len(self.arrays)]
        for shard in self.shards:
            piece = by_index(value)[shard.index][0].data
            data = np.ascontiguousarray(piece).reshape(-1)
            for number in numbers:
                file, begin = self.file(version, shard), self.offset(shard, number)
                _write_as(self.stored[number].dtype, file, begin, data)


def _write_as(dtype: np.dtype, file: Path, offset: int, data: np.ndarray) -> None:
    """Write an array's elements in a dtype, a chunk at a time."""
    buffer, most = aligned_buffer(_CHUNK), _CHUNK // np.dtype(dtype).itemsize
    for start in range(0, data.size, most):
        raw = data[start : start + most].astype(dtype, copy=False).view(np.uint8)
        buffer[: raw.size] = raw
        at = offset + start * np.dtype(dtype).itemsize
        write(file, at, buffer[: padded(raw.size)])


class Maps:
    """Arrays over the files of versions, and which of them are still in use."""

    def __init__(self) -> None:
        # (version, leaf, array, address) and what lives as long as the memory is used.
        self._made: list[tuple[Path, int, int, int, weakref.ref]] = []

    def array(self, version: Path, leaf: LeafOnDisk, number: int) -> jax.Array:
        """One of a leaf's arrays; its memory is a cache, which the kernel reclaims."""
        what, pieces = leaf.arrays[number], []
        for shard in leaf.shards:
            path, offset = leaf.file(version, shard), leaf.offset(shard, number)
            flat = _mapped(path, offset, shard.elements, what.dtype)
            own = version, leaf.number, number, flat.ctypes.data, weakref.ref(flat)
            self._made.append(own)
            view = flat.reshape(shard.shape)
            pieces += [jax.device_put(view, device) for device in shard.devices]
        return jax.make_array_from_single_device_arrays(
            what.shape, leaf.sharding, pieces
        )

    def find(self, array: Any) -> tuple[Path, int, int] | None:
        """The version, leaf and array that an array is a map of; None for others."""
        if not isinstance(array, jax.Array) or array.is_deleted():
            return None
        address = array.addressable_shards[0].data.unsafe_buffer_pointer()
        for version, leaf, number, begin, _ in self._in_use():
            if begin == address:
                return version, leaf, number
        return None

    def versions_in_use(self) -> set[Path]:
        """Those that somebody may still read: their files must not change."""
        return {version for version, *_ in self._in_use()}

    def _in_use(self) -> Iterator[tuple[Path, int, int, int, weakref.ref]]:
        self._made = [made for made in self._made if made[-1]() is not None]
        return iter(self._made)


def _mapped(path: Path, offset: int, elements: int, dtype: np.dtype) -> np.ndarray:
    assert offset % ALIGN == 0, "arrays begin at pages"
    number = os.open(path, os.O_RDONLY)
    try:
        memory = mmap.mmap(
            number, elements * dtype.itemsize, prot=mmap.PROT_READ, offset=offset
        )
    finally:
        os.close(number)
    return np.frombuffer(memory, dtype)
