"""How is an array known to be what the devices held: a checksum of each slice.

A slice is what one device stores of an array. Its owner, the first device that stores
it, hashes it before it is written. Whoever reads it, onto any sharding, compares it in
memory and then cuts it up: no byte is read again after it was compared.
"""

import concurrent.futures
import dataclasses
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import xxhash

_THREADS = min(8, os.cpu_count() or 1)

Box = tuple[tuple[int, int], ...]
"""By dim, where a slice begins and ends."""

Reads = Callable[[str, Box], np.ndarray]
"""Reads a box of the array of a name."""


class DifferentError(ValueError):
    """What was read is not what was written."""


@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices of an array.

    Attributes:
      shape: of a slice; slices stand side by side.
      checksums: "2.0" (the numbers of the slice by dim; "" for a scalar) -> XXH3, 128
        bits, of its elements in C order.
    """

    shape: tuple[int, ...]
    checksums: dict[str, str]

    def boxes(self, whole: Sequence[int]) -> Iterator[tuple[str, Box]]:
        """Number and place of each slice of an array of a shape."""
        counts = [n // own for n, own in zip(whole, self.shape, strict=True)]
        for place in itertools.product(*map(range, counts)):
            box = ((i * n, (i + 1) * n) for i, n in zip(place, self.shape, strict=True))
            yield ".".join(map(str, place)), tuple(box)


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, Slices]:
    """Hash the slices that this process owns; reads them from the devices.

    Args:
      arrays: name -> array.

    Returns:
      Name -> its slices, of this process alone.
    """
    owned = [
        (name, array, shard)
        for name, array in arrays.items()
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda each: checksum(_on_host(each[2].data)), owned)
        entries = list(zip(owned, found, strict=True))
    slices = {
        name: Slices(x.sharding.shard_shape(x.shape), {}) for name, x in arrays.items()
    }
    for (name, _, shard), own in entries:
        place = _place(shard.index, slices[name].shape)
        slices[name].checksums[place] = own
    return slices


def read_slice(
    read: Reads, name: str, slices: Slices, which: tuple[str, Box]
) -> np.ndarray:
    """Read a slice, and compare it in memory.

    Args:
      read: reads it.
      name: of the array.
      slices: of the array; without a checksum it is not compared.
      which: its number and place.

    Raises:
      DifferentError: if it has another checksum.
    """
    place, box = which
    found = read(name, box)
    wanted = slices.checksums.get(place)
    if wanted is not None and checksum(found) != wanted:
        raise DifferentError(
            f"{name}[{_text(box)}] is not what the devices held when it was saved: "
            "bytes have changed"
        )
    return found


def read_compared(
    structs: Mapping[str, jax.ShapeDtypeStruct],
    slices: Mapping[str, Slices],
    read: Reads,
    *,
    in_flight: int,
) -> dict[str, jax.Array]:
    """Read arrays onto shardings, a slice at a time, and compare each in memory.

    Args:
      structs: name -> shape, dtype and sharding.
      slices: of what was written; an array without is not compared.
      read: reads a slice.
      in_flight: bytes of slices that are read at once, at least one slice.

    Returns:
      Name -> array, of this process's shards.

    Raises:
      DifferentError: if a slice has another checksum.
    """
    budget = _Budget(in_flight)
    arrays = [
        _Incoming.of(name, struct, slices.get(name)) for name, struct in structs.items()
    ]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        running = []
        for array in arrays:
            for place, box in array.needed:
                size = array.num_bytes(box)
                budget.take(size)
                running.append(pool.submit(array.fill, read, place, box))
                running[-1].add_done_callback(lambda _, size=size: budget.give(size))
        # All end before the first error is raised: nothing reads on behind it.
        concurrent.futures.wait(running)
    for each in running:
        each.result()
    return {array.name: array.placed for array in arrays}


@dataclasses.dataclass
class _Incoming:
    """An array that is being read.

    Attributes:
      name: of it.
      struct: what it becomes.
      slices: what it was written as.
      needed: number and box of the slices that this process reads.
      shards: box -> what its devices will store; None until it is known.
      left: slices to read.
      result: the array, in the end.
    """

    name: str
    struct: jax.ShapeDtypeStruct
    slices: Slices
    needed: list[tuple[str, Box]]
    shards: dict[Box, np.ndarray | None]
    left: int
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    result: jax.Array | None = None

    @classmethod
    def of(
        cls, name: str, struct: jax.ShapeDtypeStruct, slices: Slices | None
    ) -> "_Incoming":
        slices = slices or Slices(_sharding(struct).shard_shape(struct.shape), {})
        places = local_boxes(struct)
        shards: dict[Box, np.ndarray | None] = dict.fromkeys(places.values())
        needed = [
            (place, box)
            for place, box in slices.boxes(struct.shape)
            if any(_common(box, shard) is not None for shard in shards)
        ]
        return cls(name, struct, slices, needed, shards, len(needed))

    @property
    def placed(self) -> jax.Array:
        assert self.result is not None, "a slice was not read"
        return self.result

    def num_bytes(self, box: Box) -> int:
        sizes = (end - start for start, end in box)
        return math.prod(sizes) * self.struct.dtype.itemsize

    def fill(self, read: Reads, place: str, box: Box) -> None:
        """Read a slice, compare it, and hand it to the shards that have a part."""
        found = read_slice(read, self.name, self.slices, (place, box))
        for shard in self.shards:
            if (common := _common(box, shard)) is not None:
                self._hand(found, box, shard, common)
        with self.lock:
            self.left -= 1
            is_last = not self.left
        if is_last:
            self._place()

    def _hand(self, found: np.ndarray, box: Box, shard: Box, common: Box) -> None:
        if common == shard == box:
            self.shards[shard] = found.astype(self.struct.dtype, copy=False)
            return
        with self.lock:
            held = self.shards[shard]
            if held is None:
                shape = [end - start for start, end in shard]
                held = self.shards[shard] = np.empty(shape, self.struct.dtype)
        held[_within(common, shard)] = found[_within(common, box)]

    def _place(self) -> None:
        """Make the array; its shards' memory on the host is let go."""
        sharding = _sharding(self.struct)
        kind = sharding.memory_kind
        parts = []
        for device, shard in local_boxes(self.struct).items():
            place = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
            parts.append(jax.device_put(self.shards[shard], place))
        self.shards = {}
        shape = self.struct.shape
        self.result = jax.make_array_from_single_device_arrays(shape, sharding, parts)


class _Budget:
    """Bytes that may be taken at once; one that is larger waits for all others."""

    def __init__(self, size: int):
        self._size, self._taken = size, 0
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        """Wait until so many are free."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._taken or self._taken + size <= self._size
            )
            self._taken += size

    def give(self, size: int) -> None:
        """Give back what was taken."""
        with self._changed:
            self._taken -= size
            self._changed.notify_all()


def _on_host(shard: jax.Array) -> np.ndarray:
    """A copy of a shard that is let go: jax keeps the one of the shard itself."""
    parts = shard.shape, shard.sharding, [shard]
    return np.asarray(jax.make_array_from_single_device_arrays(*parts))


def checksum(array: np.ndarray) -> str:
    """XXH3, 128 bits, of an array's elements in C order."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return xxhash.xxh3_128_hexdigest(flat.view(np.uint8))


def _sharding(struct: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
    assert struct.sharding is not None, "checked by require_shardings"
    return struct.sharding


def local_boxes(struct: jax.ShapeDtypeStruct) -> dict[Any, Box]:
    """This process's devices, and what each stores."""
    sharding, shape = _sharding(struct), struct.shape
    found = sharding.addressable_devices_indices_map(shape).items()
    return {
        device: box_of(index, shape) for device, index in found if index is not None
    }


def box_of(index: tuple[slice, ...], shape: Sequence[int]) -> Box:
    """The box that a device's index of an array of a shape is."""
    pairs = zip(index, shape, strict=True)
    return tuple(own.indices(size)[:2] for own, size in pairs)


def _place(index: tuple[slice, ...], shape: Sequence[int]) -> str:
    """The numbers of a slice by dim."""
    pairs = zip(index, shape, strict=True)
    return ".".join(str((own.start or 0) // size) for own, size in pairs)


def _common(one: Box, other: Box) -> Box | None:
    """Where two boxes overlap; None where they don't. Scalars do."""
    pairs = zip(one, other, strict=True)
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
    return found if all(start < end for start, end in found) else None


def _within(part: Box, whole: Box) -> tuple[slice, ...]:
    pairs = zip(part, whole, strict=True)
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in pairs)


def _text(box: Box) -> str:
    return ", ".join(f"{start}:{end}" for start, end in box)
