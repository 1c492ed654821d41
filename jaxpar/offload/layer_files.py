"""How do loops get the layers of a parameter from disk, and where do gradients go?

A layer is read ahead: while a device computes with one, the next in the direction of
the loop is on its way to memory. A gradient's layer is written as the backward pass has
it, into a file beside the versions, which the update then reads.
"""

import concurrent.futures
import functools
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.offload.direct_io import ALIGN, aligned_buffer, allocate, padded, read
from jaxpar.offload.disk_files import LeafOnDisk, LocalShard
from jaxpar.offload.disk_store import DiskStore
from jaxpar.offload.host_call import host_call, planned_call
from jaxpar.progress import announce
from jaxpar.step.layer_store import LayerStore

_THREADS = 4


class LayerFiles(LayerStore):
    """The layers of a parameter on disk; a `LayerStore`.

    Args:
      leaf: the arrays on disk; the last of `stored` is a copy, or the first is read.
      devices: of the mesh, in its order, as the leaf's sharding has them.
      store: returns what has their files.
      can_run: whether the devices are there; else programs are only compiled.

    Attributes:
      dtype: of the gradients; None before one was traced.
      failed: what the disk answered since the last `failure`.
    """

    def __init__(
        self,
        leaf: LeafOnDisk,
        devices: Sequence[Any],
        store: Callable[[], DiskStore],
        *,
        can_run: bool,
    ):
        self.leaf, self.store, self.can_run = leaf, store, can_run
        self._shards = {
            devices.index(device): shard
            for shard in leaf.shards
            for device in shard.devices
        }
        self._ahead = {shard.number: _Ahead() for shard in leaf.shards}
        # Several devices may have a shard; the first one writes its gradient.
        self._writers = {
            devices.index(shard.devices[0]): shard for shard in leaf.shards
        }
        self.dtype: np.dtype | None = None
        self.failed: list[OSError] = []

    def read(
        self, position: jax.Array, number: jax.Array, shape: tuple[int, ...]
    ) -> jax.Array:
        """See `LayerStore`."""
        out = jax.ShapeDtypeStruct(shape, self._computed.dtype)
        return self._call("read", self._read, out, position, number)

    def write(
        self, position: jax.Array, number: jax.Array, grad: jax.Array
    ) -> jax.Array:
        """See `LayerStore`."""
        self.dtype = np.dtype(grad.dtype)
        out = jax.ShapeDtypeStruct((), jnp.float32)
        return self._call("write", self._write, out, position, number, grad)

    def _call(
        self, name: str, function: Callable[..., Any], out: Any, *args: jax.Array
    ) -> jax.Array:
        if self.can_run:
            return host_call(function, out, *args)
        return planned_call(f"layer.{name}", out, *args)

    def failure(self) -> OSError | None:
        """See `LayerStore`; the error names the file."""
        first = self.failed[0] if self.failed else None
        self.failed.clear()
        return first

    @functools.cached_property
    def grads(self) -> dict[int, Path]:
        """By number of a shard, the file of its gradient; with room on the disk."""
        assert self.dtype is not None, "a gradient was traced"
        folder, found = self.store().folder / "grads", {}
        folder.mkdir(exist_ok=True)
        for shard in self.leaf.shards:
            path = folder / f"{self.leaf.number:04d}-{shard.number:02d}.bin"
            size = padded(shard.elements * self.dtype.itemsize)
            if not path.exists() or path.stat().st_size != size:
                allocate(path, size)
            found[shard.number] = path
        return found

    @property
    def _place(self) -> int:
        """Of the array that is computed with, among the stored ones."""
        return 0 if self.leaf.copy is None else len(self.leaf.arrays)

    @property
    def _computed(self) -> Any:
        return self.leaf.stored[self._place]

    def _read(self, position: np.ndarray, number: np.ndarray) -> np.ndarray:
        shard, layer = self._shards[int(position)], int(number)
        try:
            state = self.store().generation
            read = self._of(shard)
            return self._ahead[shard.number].get(state, layer, shard.shape[0], read)
        except OSError as error:
            self._fail(error)
            size = shard.elements // shard.shape[0]
            return np.full(size, np.nan).astype(self._computed.dtype)

    def _of(self, shard: LocalShard) -> Callable[[int], np.ndarray]:
        """``layer -> its elements``, of the current version."""
        file = self.leaf.file(self.store().current_version, shard)
        begin, dtype = self.leaf.offset(shard, self._place), self._computed.dtype
        size = math.prod(shard.shape[1:]) * dtype.itemsize

        def elements(layer: int) -> np.ndarray:
            start = begin + layer * size
            first = start // ALIGN * ALIGN
            buffer = aligned_buffer(start + size - first)
            read(file, first, buffer)
            return buffer[start - first :][:size].view(dtype)

        return elements

    def _write(
        self, position: np.ndarray, number: np.ndarray, grad: np.ndarray
    ) -> float:
        shard = self._writers.get(int(position))
        if shard is None:
            return 0.0
        data = np.ascontiguousarray(grad).reshape(-1).view(np.uint8)
        try:
            with self.grads[shard.number].open("r+b", buffering=0) as file:
                file.seek(int(number) * data.size)
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
        except OSError as error:
            self._fail(error)
            return np.nan
        return 0.0

    def _fail(self, error: OSError) -> None:
        self.failed.append(error)
        announce(f"offload: {error}")


class _Ahead:
    """Reads layers of one shard, the one after the last asked for ahead of time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[tuple[int, int], concurrent.futures.Future] = {}
        self._last = 0

    def get(
        self,
        state: int,
        layer: int,
        count: int,
        read: Callable[[int], np.ndarray],
    ) -> np.ndarray:
        """Read a layer of `count`; `state` is another number where files changed."""
        with self._lock:
            # The first pass goes one way, the second one back.
            is_first = layer == 0 and self._last != 1
            step = 1 if layer > self._last or is_first else -1
            self._last = layer
            wanted = [layer]
            if 0 <= layer + step < count:
                wanted.append(layer + step)
            self._jobs = {
                (state, number): _sound(self._jobs.get((state, number)))
                or _pool().submit(read, number)
                for number in wanted
            }
            job = self._jobs[state, layer]
        return job.result()


def _sound(job: concurrent.futures.Future | None) -> concurrent.futures.Future | None:
    """A read that has not failed."""
    return None if job is None or (job.done() and job.exception()) else job


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(
        _THREADS, thread_name_prefix="jaxpar-layers"
    )
