"""How does an array cross the data axis: gathers and reductions of leaves and scalars.

Two forms with one interface. `ManualCollectives` runs inside ``shard_map`` with data
manual: its collectives are explicit, so gradients can be summed over micro-batches
before they cross. `AutomaticCollectives` sees global arrays and states only where they
lie; the compiler inserts the collectives. Arrays at rest are given as their plan's
*view* (see `jaxpar.sharding.zero.LeafSharding`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import AXES, DATA
from jaxpar.sharding.constrain import constrain
from jaxpar.sharding.rules import axes_of
from jaxpar.sharding.zero import LeafSharding


@runtime_checkable
class Collectives(Protocol):
    """What crosses the data axis, and how."""

    def gather(self, leaf: LeafSharding, shard: jax.Array) -> jax.Array:
        """Make the whole leaf, at its compute spec, from its view at rest."""
        ...

    def reduce(self, leaf: LeafSharding, whole: jax.Array) -> jax.Array:
        """Sum a whole gradient over data, as the leaf's view at rest.

        In the dtype that it crossed in.
        """
        ...

    def communicated_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """The dtype in which gradients that are made in `dtype` cross."""
        ...

    def total(self, value: jax.Array) -> jax.Array:
        """Sum a scalar over data."""
        ...

    def largest(self, value: jax.Array) -> jax.Array:
        """The largest of a scalar over data."""
        ...

    def shard_number(self) -> jax.Array:
        """This data shard's number, from 0."""
        ...


@dataclasses.dataclass(frozen=True)
class ManualCollectives:
    """Explicit collectives, for a body whose data axis is manual.

    Attributes:
      reduce_dtype: the dtype in which gradients cross.
      platform: the mesh's platform; the CPU reduces in fp32 whatever `reduce_dtype`.
    """

    reduce_dtype: jnp.dtype
    platform: str

    def gather(self, leaf: LeafSharding, shard: jax.Array) -> jax.Array:
        """All-gather along the view's data dim."""
        dim = leaf.view_data_dim
        if dim is None:
            return _as_computed(leaf, shard)
        gather = functools.partial(
            jax.lax.all_gather, axis_name=DATA, axis=dim, tiled=True
        )
        return _as_computed(leaf, _on_placed_shards(gather, leaf)(shard))

    def reduce(self, leaf: LeafSharding, whole: jax.Array) -> jax.Array:
        """Reduce-scatter along the view's data dim, or all-reduce a leaf kept whole."""
        view = constrain(_as_made(leaf, whole), *leaf.view_spec(data=False))
        view = view.astype(self.communicated_dtype(view.dtype))
        dim = leaf.view_data_dim
        if dim is None:
            reduce = functools.partial(jax.lax.psum, axis_name=DATA)
        else:
            reduce = functools.partial(
                jax.lax.psum_scatter, axis_name=DATA, scatter_dimension=dim, tiled=True
            )
        return self._as_kept(_on_placed_shards(reduce, leaf)(view))

    def _as_kept(self, reduced: jax.Array) -> jax.Array:
        """A reduced gradient, in memory as its parameter is.

        NCCL scatters along the first dim in memory, so that XLA puts data's first; and
        would go through parameters and moments in that order too, which can't be done
        in place: it copies the whole state (jax 0.11.2).
        """
        if self.platform != "gpu":
            return reduced
        return with_layout_constraint(reduced, Layout(tuple(range(reduced.ndim))))

    def communicated_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """The one they are told to cross in, or the platform's."""
        return wire_dtype(self.reduce_dtype, self.platform)

    def total(self, value: jax.Array) -> jax.Array:
        """All-reduce."""
        return jax.lax.psum(value, DATA)

    def largest(self, value: jax.Array) -> jax.Array:
        """All-reduce."""
        return jax.lax.pmax(value, DATA)

    def shard_number(self) -> jax.Array:
        """Its place on the axis."""
        return jax.lax.axis_index(DATA)


@dataclasses.dataclass(frozen=True)
class AutomaticCollectives:
    """Layouts only, for a body that sees the whole micro-batch."""

    def gather(self, leaf: LeafSharding, shard: jax.Array) -> jax.Array:
        """State the layout at rest, then the one computed on."""
        stored = constrain(shard, *leaf.view_spec())
        # In two steps: over both axes at once, every tensor shard would cross data.
        over_tensor = constrain(stored, *leaf.view_spec(data=False))
        return _as_computed(leaf, over_tensor)

    def reduce(self, leaf: LeafSharding, whole: jax.Array) -> jax.Array:
        """State the layout at rest; the sum is the compiler's."""
        return constrain(_as_made(leaf, whole), *leaf.view_spec())

    def communicated_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """The same: the compiler reduces what the backward pass makes."""
        return dtype

    def total(self, value: jax.Array) -> jax.Array:
        """Nothing to add: the value is global."""
        return value

    def largest(self, value: jax.Array) -> jax.Array:
        """Nothing to compare: the value is global."""
        return value

    def shard_number(self) -> jax.Array:
        """There is one, of all rows."""
        return jnp.int32(0)


def wire_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """The dtype in which a reduction over a manual axis crosses: fp32 on CPUs.

    XLA:CPU aborts the process on one in bf16 while another axis is automatic (seen on
    jax 0.10.2, 0.11.2 and 0.12.0.1).
    """
    return jnp.dtype(jnp.float32) if platform == "cpu" else jnp.dtype(dtype)


def _on_placed_shards(
    collectives: Callable[[jax.Array], jax.Array], leaf: LeafSharding
) -> Callable[[jax.Array], jax.Array]:
    """Run a manual collective over data on each pipe and tensor shard of a view.

    The compiler does not look into a collective that is manual: where another axis is
    automatic, it makes the operand whole over that first (jax 0.10.2 to 0.12.0.1).
    """
    if not any(leaf.placed):
        return collectives
    spec = leaf.view_spec(data=False)
    return jax.shard_map(
        collectives,
        in_specs=(spec,),
        out_specs=spec,
        axis_names=set(AXES) - {DATA},
        check_vma=False,
    )


def _as_computed(leaf: LeafSharding, view: jax.Array) -> jax.Array:
    """Lay a view that is whole over data out as its leaf is computed on."""
    kept = (
        axes_of(entry) if rests else ()
        for entry, rests in zip(leaf.compute, leaf.placed, strict=True)
    )
    view = constrain(view, *leaf.in_view(list(kept)))
    return constrain(view.reshape(leaf.shape), *leaf.compute)


def _as_made(leaf: LeafSharding, grad: jax.Array) -> jax.Array:
    """See a gradient as its leaf's view, laid out as the leaf was computed on.

    Stated, because the compiler would else carry the layout at rest back into the
    backward pass, and split activations over tensor along the width.
    """
    return constrain(grad, *leaf.compute).reshape(leaf.view_shape)


def to_view(sharded: LeafSharding, leaf: jax.Array) -> jax.Array:
    """See a leaf at rest as its plan's view, in automatic mode; nothing moves."""
    return constrain(leaf.reshape(sharded.view_shape), *sharded.view_spec())


def from_view(leaf: LeafSharding, view: jax.Array) -> jax.Array:
    """Undo `to_view`."""
    return constrain(view.reshape(leaf.shape), *leaf.stored_spec)


def manual_spec(leaf: LeafSharding) -> P:
    """The part of a view's spec that ``shard_map`` with data manual is told."""
    return leaf.view_spec(placed=False)
