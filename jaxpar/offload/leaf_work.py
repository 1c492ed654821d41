"""What does a step do with a leaf that is on disk, piece by piece?"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxpar.offload.disk_files import LeafOnDisk
from jaxpar.offload.disk_pipeline import DiskPiece, ranges
from jaxpar.offload.native import Pass
from jaxpar.offload.rest import by_index, placed_on


class LeafWork:
    """A leaf's update: its pieces, and the copy for the devices that they make.

    Args:
      leaf: what is on disk.
      run: updates the elements of arrays in memory.
      grad: the gradient, which may be computed still.
      scalars: what `run` gets beside arrays.
      copy: the last copy, whose shape, dtype and sharding the new one has.
    """

    def __init__(
        self,
        leaf: LeafOnDisk,
        run: Pass,
        grad: jax.Array,
        scalars: Sequence[np.ndarray],
        copy: jax.Array,
    ):
        self.leaf, self.run, self.grad = leaf, run, grad
        self.scalars, self.copy = scalars, copy
        self._grads: dict[str, np.ndarray] = {}
        self._new: dict[str, np.ndarray] = {}

    def pieces(self, elements: int) -> Iterator[DiskPiece]:
        """In the order of the file; `elements` is the most that one has."""
        for shard in self.leaf.shards:
            for start, stop in ranges(math.prod(shard.shape), elements):
                yield DiskPiece(self.leaf, shard, start, stop, self._compute)

    def _compute(self, piece: DiskPiece, arrays: list[np.ndarray]) -> None:
        index, own = piece.shard.index, slice(piece.start, piece.stop)
        if index not in self._grads:  # Reading it waits for the devices.
            data = by_index(self.grad)[index][0].data
            self._grads[index] = np.ascontiguousarray(data).reshape(-1)
            self._new[index] = np.empty(piece.shard.shape, self.copy.dtype)
        copied = self._new[index].reshape(-1)[own]
        beside = self._grads[index][own]
        self.run([*arrays, beside, *arrays, copied], self.scalars)
        if piece.stop == self._new[index].size:
            del self._grads[index]

    def new_copies(self) -> dict[str, jax.Array]:
        """By name, the copy on the devices; after all pieces."""
        made = placed_on(self.copy.sharding, self.copy.shape, self._new)
        return {self.leaf.name: made}


class LayersWork:
    """The update of a leaf that loops fetch from disk, and whose gradient is there.

    Args:
      leaf: what is on disk, its copy too if there is one.
      run: updates the elements of arrays in memory.
      grads: by number of a shard, the file of its gradient.
      dtype: of the gradient.
      scalars: what `run` gets beside arrays.
    """

    def __init__(
        self,
        leaf: LeafOnDisk,
        run: Pass,
        grads: Mapping[int, Path],
        dtype: np.dtype,
        scalars: Sequence[np.ndarray],
    ):
        self.leaf, self.run, self.scalars = leaf, run, scalars
        self.grads, self.dtype = grads, dtype

    def pieces(self, elements: int) -> Iterator[DiskPiece]:
        """As of `LeafWork`."""
        for shard in self.leaf.shards:
            beside = self.grads[shard.number], self.dtype
            for start, stop in ranges(math.prod(shard.shape), elements):
                yield DiskPiece(self.leaf, shard, start, stop, self._compute, beside)

    def _compute(self, piece: DiskPiece, arrays: list[np.ndarray]) -> None:
        count = len(piece.leaf.arrays)
        own, copy, grads = arrays[:count], arrays[count:-1], arrays[-1]
        self.run([*own, grads, *own, *copy], self.scalars)

    def new_copies(self) -> dict[str, jax.Array]:
        """None: it is on disk."""
        return {}
