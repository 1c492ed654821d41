"""How is a process's part of a state kept in a file of the host's memory?

A file of /dev/shm outlives the process that wrote it, and its supervisor. It holds the
bytes of the process's shards, then a table of them as JSON, and first of all the sizes
and the checksum of the table, which are written last: a file that was not written to
its end holds nothing.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from jaxpar.checkpoint.slices import Box, box_of, checksum, local_boxes
from jaxpar.tree import stored_struct

START = 64
"""Bytes before the shards."""
_HEAD = struct.Struct("<8sQQ16s")  # Name, bytes of the shards, of the table, its hash.
_NAME, _ALIGNED, _MOST_TABLE = b"jaxpar-1", 64, 256 << 20
_THREADS = 4


class NotHeldError(ValueError):
    """A file of memory does not hold what it should."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of an array, as one device stores it.

    Attributes:
      leaf: the array's name.
      box: which part it is.
      dtype: of its elements.
      start: of its bytes, in the file.
      num_bytes: how many they are.
      checksum: of its elements.
    """

    leaf: str
    box: Box
    dtype: str
    start: int
    num_bytes: int
    checksum: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(end - start for start, end in self.box)


@dataclasses.dataclass(frozen=True)
class MemoryRecord:
    """What a file of memory says of itself.

    Attributes:
      process: whose shards it has.
      processes: of the run.
      step: of the state.
      timeline: of the steps that follow one another; another one after a rollback.
      data_state: the process's position in the data.
      meta: other values of the step.
      shards: in the order of the file.
    """

    process: int
    processes: int
    step: int
    timeline: str
    data_state: Any
    meta: dict[str, Any]
    shards: tuple[Shard, ...]


def boxes_of(structs: Mapping[str, Any]) -> list[tuple[str, Box, str]]:
    """Leaf, box and dtype of the shards of this process, without repetitions.

    Args:
      structs: name -> array without keys, or its shape, dtype and sharding.
    """
    return [
        (name, box, str(struct.dtype))
        for name, struct in structs.items()
        for box in sorted(set(local_boxes(stored_struct(struct)).values()))
    ]


def write_shards(path: Path, arrays: Mapping[str, jax.Array]) -> tuple[Shard, ...]:
    """Copy this process's shards into a file, which holds nothing until it is `seal`ed.

    Args:
      path: of the file; one that is there is written over.
      arrays: name -> array.

    Returns:
      The shards, with checksums of what the devices hold.

    Raises:
      OSError: if the memory has no room for them.
    """
    held: dict[tuple[str, Box], jax.Array] = {}
    for name, array in arrays.items():
        for each in array.addressable_shards:
            held.setdefault((name, box_of(each.index, array.shape)), each.data)
    for data in held.values():
        data.copy_to_host_async()
    shards, at = [], START
    for name, box, dtype in boxes_of(arrays):
        size = held[name, box].size * jnp.dtype(dtype).itemsize
        shards.append(Shard(name, box, dtype, at, size))
        at += -(-size // _ALIGNED) * _ALIGNED

    def copied(shard: Shard) -> Shard:
        array = np.ascontiguousarray(held[shard.leaf, shard.box])
        _write_at(file.fileno(), shard.start, array.reshape(-1).view(np.uint8).data)
        return dataclasses.replace(shard, checksum=checksum(array))

    # Written, not mapped: a page fault for each 4 KiB takes longer than the copy.
    with _emptied(path, at) as file, ThreadPoolExecutor(_THREADS) as pool:
        return tuple(pool.map(copied, shards))


def seal(path: Path, kept: MemoryRecord) -> None:
    """Make a file hold the shards that were written to it."""
    size = path.stat().st_size
    table = json.dumps(dataclasses.asdict(kept)).encode()
    head = _HEAD.pack(_NAME, size, len(table), xxhash.xxh3_128_digest(table))
    with path.open("r+b") as file:
        file.seek(size)
        file.write(table)
        file.truncate()
        file.seek(0)
        file.write(head)


def read_kept(path: Path) -> MemoryRecord | None:
    """What a file says of itself; None if it is missing or was not sealed."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            name, size, length, wanted = _HEAD.unpack(head)
            if name != _NAME or length > _MOST_TABLE:
                return None
            file.seek(size)
            table = file.read(length)
        if len(table) != length or xxhash.xxh3_128_digest(table) != wanted:
            return None
        content = json.loads(table)
        shards = tuple(_shard(each) for each in content.pop("shards"))
        return MemoryRecord(**content, shards=shards)
    except (OSError, ValueError, TypeError, KeyError, struct.error):
        return None


def read_arrays(path: Path, kept: MemoryRecord) -> dict[tuple[str, Box], np.ndarray]:
    """Copies of a file's shards, compared with their checksums.

    Returns:
      (leaf, box) -> the shard.

    Raises:
      NotHeldError: if one has other bytes than were written.
      OSError: if the file is gone.
    """
    found = {}
    with _mapped(path) as memory:
        for shard in kept.shards:
            array = _array(memory, shard).copy()
            if checksum(array) != shard.checksum:
                raise NotHeldError(f"{shard.leaf} in {str(path)!r} has changed")
            found[shard.leaf, shard.box] = array
    return found


def placed(struct: jax.ShapeDtypeStruct, shards: Mapping[Box, np.ndarray]) -> jax.Array:
    """The array that has these shards on this process's devices."""
    sharding = struct.sharding
    assert sharding is not None, "checked by require_shardings"
    parts = [
        jax.device_put(
            shards[box],
            jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
        )
        for device, box in local_boxes(struct).items()
    ]
    return jax.make_array_from_single_device_arrays(struct.shape, sharding, parts)


@contextlib.contextmanager
def _emptied(path: Path, size: int) -> Iterator[BinaryIO]:
    """A file of a size that holds nothing; made if there is none."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT
    with open(os.open(path, flags, 0o600), "r+b") as file:
        file.write(bytes(START))
        file.flush()
        os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(size)
        yield file


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    """The bytes of a file."""
    with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        # Closed with the last array of it, which an error's traceback may have.
        yield memoryview(mmap.mmap(file.fileno(), size))


def _write_at(file: int, start: int, content: memoryview) -> None:
    """Write all of some bytes; one call may take fewer."""
    while content:
        written = os.pwrite(file, content, start)
        start, content = start + written, content[written:]


def _array(memory: memoryview, shard: Shard) -> np.ndarray:
    dtype = jnp.dtype(shard.dtype)
    count = shard.num_bytes // dtype.itemsize
    flat = np.frombuffer(memory, dtype, count, shard.start) if count else np.empty(0)
    return flat.astype(dtype, copy=False).reshape(shard.shape)


def _shard(content: dict[str, Any]) -> Shard:
    box: Sequence[Sequence[int]] = content.pop("box")
    return Shard(box=tuple((start, end) for start, end in box), **content)
