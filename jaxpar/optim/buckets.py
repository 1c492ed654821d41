"""How are many leaves packed into flat arrays, so that one launch covers them all?

A bucket holds the leaves that are sharded over the same mesh axes. On each device it is
one flat array of the device's shards, each padded with zeros to full tiles. Packing
needs no communication.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import AXES
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.rules import axes_of
from kernels_pallas.fused_optimizers import TILE


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves that are sharded over the same axes.

    Attributes:
      axes: mesh axes of more than one device, over which each leaf is sharded.
      members: indices of the leaves, in flattening order.
      shapes: the shape of each leaf's shard on a device.
    """

    axes: tuple[str, ...]
    members: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        """The bucket's name in paths."""
        return "_".join(("over", *self.axes)) if self.axes else "whole"

    @property
    def spec(self) -> P:
        """The flat array's spec."""
        return P(self.axes) if self.axes else P()

    @property
    def tiles(self) -> tuple[int, ...]:
        """Tiles of each leaf's shard."""
        return tuple(-(-math.prod(shape) // TILE) for shape in self.shapes)

    @property
    def leaf_of_tiles(self) -> np.ndarray:
        """The index in `members` of each tile's leaf; int32, [tiles]."""
        return np.repeat(np.arange(len(self.members), dtype=np.int32), self.tiles)

    def flat(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """Concatenate shards of the leaves; [tiles x TILE]."""
        filled = [
            jnp.pad(piece.reshape(-1), (0, tiles * TILE - piece.size))
            for piece, tiles in zip(pieces, self.tiles, strict=True)
        ]
        return jnp.concatenate(filled)

    def pieces(self, flat: jax.Array) -> list[jax.Array]:
        """Undo `flat`."""
        starts = itertools.accumulate(self.tiles, initial=0)
        return [
            flat[start * TILE : start * TILE + math.prod(shape)].reshape(shape)
            for start, shape in zip(starts, self.shapes, strict=False)
        ]


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The buckets of a tree of parameters on a mesh.

    Attributes:
      leaf_shardings: the leaves' shardings, in flattening order.
      mesh: the mesh.
    """

    leaf_shardings: tuple[LeafSharding, ...]
    mesh: Mesh

    @functools.cached_property
    def by_name(self) -> dict[str, Bucket]:
        """The buckets."""
        grouped: dict[tuple[str, ...], list[int]] = {}
        for number, leaf in enumerate(self.leaf_shardings):
            split = {axis for entry in leaf.stored_spec for axis in axes_of(entry)}
            axes = tuple(a for a in AXES if a in split and self.mesh.shape[a] > 1)
            grouped.setdefault(axes, []).append(number)
        found = [
            Bucket(axes, tuple(numbers), tuple(map(self._piece, numbers)))
            for axes, numbers in grouped.items()
        ]
        return {bucket.name: bucket for bucket in found}

    def _piece(self, number: int) -> tuple[int, ...]:
        leaf = self.leaf_shardings[number]
        return NamedSharding(self.mesh, leaf.stored_spec).shard_shape(leaf.shape)

    @property
    def filling(self) -> float:
        """The fraction of a device's elements that is padding."""
        buckets = self.by_name.values()
        there = sum(TILE * sum(bucket.tiles) for bucket in buckets)
        used = sum(math.prod(s) for bucket in buckets for s in bucket.shapes)
        return 1 - used / there if there else 0.0

    def sharding(self, bucket: Bucket) -> NamedSharding:
        """The sharding of a bucket's flat array, and of its values by tile."""
        return NamedSharding(self.mesh, bucket.spec)

    def specs(self) -> dict[str, P]:
        """The specs of the flat arrays, by bucket."""
        return {name: bucket.spec for name, bucket in self.by_name.items()}

    def pack(
        self,
        leaves: Sequence[jax.Array],
        then: Callable[[jax.Array], Any] | None = None,
    ) -> dict[str, Any]:
        """Pack stored leaves into buckets.

        Args:
          leaves: in flattening order, at their storage specs.
          then: applied to each device's flat shard; None for the identity.

        Returns:
          The flat arrays by bucket, or the results of `then`.
        """

        def body(leaves: list[jax.Array]) -> dict[str, Any]:
            flat = {
                name: bucket.flat([leaves[number] for number in bucket.members])
                for name, bucket in self.by_name.items()
            }
            return flat if then is None else jax.tree.map(then, flat)

        return self.mapped(body, (self._stored,), self.specs())(list(leaves))

    def unpack(
        self, buckets: dict[str, Any], first: Callable[[Any], jax.Array] | None = None
    ) -> list[jax.Array]:
        """Undo `pack`.

        Args:
          buckets: the flat arrays by bucket, or arguments for `first`.
          first: returns each device's flat shard; None for the identity.

        Returns:
          The leaves.
        """

        def body(buckets: dict[str, Any]) -> list[jax.Array]:
            found: dict[int, jax.Array] = {}
            for name, bucket in self.by_name.items():
                flat = buckets[name] if first is None else first(buckets[name])
                found |= zip(bucket.members, bucket.pieces(flat), strict=True)
            return [found[number] for number in range(len(self.leaf_shardings))]

        return self.mapped(body, (self.specs(),), self._stored)(buckets)

    def mapped(self, body: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Run on each device's own shards."""
        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    @property
    def _stored(self) -> list[P]:
        return [leaf.stored_spec for leaf in self.leaf_shardings]
