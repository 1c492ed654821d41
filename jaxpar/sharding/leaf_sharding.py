"""How is one leaf stored, and how computed on: two specs over the mesh's axes."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from jaxpar.mesh import BATCH_AXES, DATA, REPLICA, ZERO_AXES, entry_of
from jaxpar.sharding.rules import Spec, axes_of


@dataclasses.dataclass(frozen=True)
class LeafSharding:
    """The shardings of one leaf: as stored, and as computed on.

    Where data and another axis split the same dim, that dim is two dims in the leaf's
    *view*: the other axis splits the first, data the second. With the batch axes manual
    the leaf is then gathered over data on every tensor shard, and tensor shards do not
    move.

    Attributes:
      name: the leaf's path.
      shape: its logical shape.
      compute: one mesh axis, several, or None per dim, while it is computed on.
      data_dim: the dim that `data_axes` split in storage; None if they split none.
      placed: by dim, which other axes (pipe, tensor, expert) split it in storage.
      sizes: mesh axis -> devices on it.
      why: the reason, for people.
      reduce_axes: the batch axes over which its gradient is summed: those that do not
        split it while it is computed on.
      over_replicas: whether replicas split each data shard in storage; a step gathers
        it over them first.

    Example: a (64, 17) kernel on data 4 x tensor 2, its rows split by tensor. 4 does
      not divide 17, so data splits the rows too: 8 devices store 8 rows each. In the
      view (2, 32, 17), tensor splits dim 0 and data dim 1. An all-gather over data
      along dim 1 gives each device the 32 rows of its tensor shard.

      >>> sizes = {"data": 4, "tensor": 2}
      >>> leaf = LeafSharding(
      ...     "w", (64, 17), ("tensor", None), 0, (("tensor",), ()), sizes, ""
      ... )
      >>> tuple(leaf.stored_spec)
      (('tensor', 'data'), None)
      >>> leaf.view_shape, tuple(leaf.view_spec())
      ((2, 32, 17), ('tensor', 'data', None))
    """

    name: str
    shape: tuple[int, ...]
    compute: Spec
    data_dim: int | None
    placed: tuple[tuple[str, ...], ...]
    sizes: Mapping[str, int] = dataclasses.field(hash=False)
    why: str
    reduce_axes: tuple[str, ...] = (DATA,)
    over_replicas: bool = False

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that ZeRO shards the leaf over, inside a replica."""
        return tuple(axis for axis in self.reduce_axes if axis in ZERO_AXES)

    @property
    def storage_axes(self) -> tuple[str, ...]:
        """The axes that ZeRO shards the leaf over in storage, outermost first."""
        return (*self.data_axes, *((REPLICA,) if self.over_replicas else ()))

    @property
    def reduced_inside(self) -> tuple[str, ...]:
        """The axes over which its gradient is summed wherever it is reduced."""
        return self.data_axes if self.is_split else self.reduce_axes

    @property
    def reduced_between(self) -> tuple[str, ...]:
        """The other axes of `reduce_axes`, over which it is summed once a step."""
        return tuple(a for a in self.reduce_axes if a not in self.reduced_inside)

    def dim_of(self, axis: str) -> int | None:
        """The dim that pipe, tensor or expert splits in storage; None if none."""
        dims = (dim for dim, axes in enumerate(self.placed) if axis in axes)
        return next(dims, None)

    @property
    def shares_dim(self) -> bool:
        """Whether data and another axis split the same dim in storage."""
        return self.data_dim is not None and bool(self.placed[self.data_dim])

    @property
    def ways_computed(self) -> int:
        """Number of shards while computed on."""
        return self._ways(a for axes in self.compute for a in axes_of(axes))

    @property
    def ways_placed(self) -> int:
        """Number of shards in storage by the other axes than data."""
        return self._ways(axis for axes in self.placed for axis in axes)

    @property
    def data_ways(self) -> int:
        """Number of shards that `data_axes` make."""
        return self._ways(self.data_axes)

    @property
    def ways_stored(self) -> int:
        """Number of shards in storage."""
        ways = self._ways(self.storage_axes) if self.is_split else 1
        return self.ways_placed * ways

    @property
    def is_split(self) -> bool:
        """Whether data splits the leaf in storage."""
        return self.data_dim is not None

    def _ways(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    @property
    def stored_spec(self) -> P:
        """The storage spec, over the logical shape."""
        entries = list(self.placed)
        if self.data_dim is not None:
            entries[self.data_dim] = (*entries[self.data_dim], *self.storage_axes)
        return P(*map(entry_of, entries))

    @property
    def compute_spec(self) -> P:
        """The compute spec, over the logical shape."""
        return P(*self.compute)

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The logical shape, with a dim that data shares as two dims."""
        dim = self.data_dim
        if dim is None or not self.shares_dim:
            return self.shape
        ways = self._ways(self.placed[dim])
        return (
            *self.shape[:dim],
            ways,
            self.shape[dim] // ways,
            *self.shape[dim + 1 :],
        )

    @property
    def on_shard(self) -> "LeafSharding":
        """The leaf as a shard of the batch axes sees it, where they are manual."""

        def kept(entries: Iterable[Any]) -> list[tuple[str, ...]]:
            return [
                tuple(axis for axis in axes_of(entry) if axis not in BATCH_AXES)
                for entry in entries
            ]

        split = [self._ways(a for a in axes if a in BATCH_AXES) for axes in self.placed]
        if math.prod(split) == 1:
            return self
        return dataclasses.replace(
            self,
            shape=tuple(n // by for n, by in zip(self.shape, split, strict=True)),
            compute=tuple(map(entry_of, kept(self.compute))),
            placed=tuple(kept(self.placed)),
        )

    @property
    def view_data_dim(self) -> int | None:
        """The dim of the view that data splits."""
        if self.data_dim is None:
            return None
        return self.data_dim + self.shares_dim

    @property
    def shard_view_shape(self) -> tuple[int, ...]:
        """The view's shape on one data shard of a replica."""
        dim, shape = self.view_data_dim, list(self.view_shape)
        if dim is not None:
            shape[dim] //= self.data_ways
        return tuple(shape)

    def view_spec(self, *, data: bool = True) -> P:
        """The storage spec over the view, with data or without."""
        entries = self.in_view(self.placed)
        if data and self.view_data_dim is not None:
            entries[self.view_data_dim] = entry_of(self.storage_axes)
        return P(*entries)

    @property
    def view_shard_shape(self) -> tuple[int, ...]:
        """The shape of a device's part of the view."""
        entries = zip(self.view_shape, self.view_spec(), strict=True)
        return tuple(size // self._ways(axes_of(axes)) for size, axes in entries)

    @property
    def batch_spec(self) -> P:
        """The batch axes' part of the storage spec over the view."""
        own = [tuple(a for a in axes if a in BATCH_AXES) for axes in self.placed]
        entries = self.in_view(own)
        if self.view_data_dim is not None:
            entries[self.view_data_dim] = entry_of(self.storage_axes)
        return P(*entries)

    def in_view(self, axes: Sequence[tuple[str, ...]]) -> list[Any]:
        """Make a spec's entries over the view from axes by logical dim."""
        entries = [entry_of(names) for names in axes]
        if self.data_dim is not None and self.shares_dim:
            entries.insert(self.data_dim + 1, None)
        return entries

    def not_reduced_over(self, axes: tuple[str, ...]) -> "LeafSharding":
        """The leaf whose gradient the devices of some axes have each their own of."""
        if not axes:
            return self
        rest = tuple(axis for axis in self.reduce_axes if axis not in axes)
        return dataclasses.replace(self, reduce_axes=rest)

    def stacked(self, axes: tuple[str, ...]) -> "LeafSharding":
        """The leaf with a leading dim that axes split; itself for none."""
        if not axes:
            return self
        return dataclasses.replace(
            self,
            shape=(self._ways(axes), *self.shape),
            compute=(entry_of(axes), *self.compute),
            data_dim=None if self.data_dim is None else self.data_dim + 1,
            placed=(axes, *self.placed),
        )

    def without_leading_dim(self) -> "LeafSharding | None":
        """The sharding of one slice along dim 0; None if an axis splits that dim."""
        if self.data_dim == 0 or self.placed[0] or self.compute[0] is not None:
            return None
        return dataclasses.replace(
            self,
            shape=self.shape[1:],
            compute=self.compute[1:],
            data_dim=None if self.data_dim is None else self.data_dim - 1,
            placed=self.placed[1:],
        )
