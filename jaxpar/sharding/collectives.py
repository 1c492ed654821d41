"""How are arrays gathered and reduced over data: collectives of leaves and scalars.

Two forms with one interface. `ManualCollectives` runs inside ``shard_map`` with the
batch axes manual: its collectives are explicit, so gradients can be summed over
micro-batches before they are reduced. `AutomaticCollectives` sees global arrays and
only constrains their shardings; the compiler inserts the collectives. Stored arrays are
passed as the *view* of their sharding (see `LeafSharding`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import DATA, PIPE, REPLICA, TENSOR
from jaxpar.sharding.constrain import constrain_axes as constrain
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.rules import axes_of
from jaxpar.sharding.torus import groups_along

_BY_DIM = 1 << 18
"""Elements of a leaf, below which it is gathered along all dims of a torus at once."""


@runtime_checkable
class Collectives(Protocol):
    """The collectives over the batch axes that a step uses."""

    def gather(self, leaf: LeafSharding, shard: jax.Array) -> jax.Array:
        """Gather a leaf to its compute spec from its stored view."""
        ...

    def gather_replicas(self, leaf: LeafSharding, shard: jax.Array) -> jax.Array:
        """Gather a leaf's stored view over the replicas that split it, for `gather`."""
        ...

    def reduce(self, leaf: LeafSharding, whole: jax.Array) -> jax.Array:
        """Sum an unsharded gradient inside a replica, to the view that `gather` takes.

        The result has the dtype of the reduction.
        """
        ...

    def reduce_replicas(self, leaf: LeafSharding, view: jax.Array) -> jax.Array:
        """Sum what `reduce` returned over the replicas, to the leaf's stored view."""
        ...

    def communicated_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """The dtype in which gradients computed in `dtype` are reduced."""
        ...

    def total(self, value: jax.Array) -> jax.Array:
        """Sum a scalar over data."""
        ...

    def total_of_shards(self, leaf: LeafSharding, value: jax.Array) -> jax.Array:
        """Sum over data what was summed over a shard of the leaf's view."""
        ...

    def largest(self, value: jax.Array) -> jax.Array:
        """The maximum of a scalar over data."""
        ...

    def shard_number(self) -> jax.Array:
        """The number of this shard of the rows, from 0."""
        ...

    def on_devices(
        self, fn: Callable[..., jax.Array], leaf: LeafSharding, *, as_view: bool
    ) -> Callable[..., jax.Array]:
        """Run ``fn(position on the mesh, number, *shards)`` on every device.

        Args:
          fn: is given a scalar, and the device's shards of views of the leaf.
          leaf: the leaf.
          as_view: whether it returns a shard of the view; else one same value.

        Returns:
          A function of the number and the views.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ManualCollectives:
    """Explicit collectives, for a body whose batch axes are manual.

    Attributes:
      axes: the batch axes.
      reduce_dtype: the dtype in which gradients are reduced.
      platform: the mesh's platform; CPUs reduce in fp32 whatever `reduce_dtype` is.
      torus: the dims of a TPU slice's torus that data is made of, outermost first; data
        is gathered, and reduced, along one after the other. Empty for all at once.
    """

    axes: tuple[str, ...]
    reduce_dtype: jnp.dtype
    platform: str
    torus: tuple[int, ...] = ()

    def gather(self, leaf: LeafSharding, shard: jax.Array) -> jax.Array:
        """All-gather along the view's data dim."""
        dim = leaf.view_data_dim
        if dim is None:
            return as_computed(leaf, shard)
        turns = self._groups(leaf.data_axes, leaf)

        def gather(shard: jax.Array) -> jax.Array:
            for axes, groups in reversed(turns):
                shard = jax.lax.all_gather(
                    shard, axes, axis=dim, tiled=True, axis_index_groups=groups
                )
            return shard

        return as_computed(leaf, on_placed_shards(gather, leaf)(shard))

    def gather_replicas(self, leaf: LeafSharding, shard: jax.Array) -> jax.Array:
        """All-gather along the view's data dim."""
        if not leaf.over_replicas or leaf.view_data_dim is None:
            return shard
        gather = functools.partial(
            jax.lax.all_gather, axis_name=REPLICA, axis=leaf.view_data_dim, tiled=True
        )
        return on_placed_shards(gather, leaf)(shard)

    def reduce(self, leaf: LeafSharding, whole: jax.Array) -> jax.Array:
        """Reduce-scatter along the view's data dim; all-reduce an unsharded leaf."""
        view = local_view(leaf, whole)
        view = view.astype(self.communicated_dtype(view.dtype))
        dim = leaf.view_data_dim
        over = leaf.reduced_inside
        if not over:
            return self._as_kept(view)
        turns = self._groups(over, leaf)

        def reduce(view: jax.Array) -> jax.Array:
            if dim is None:
                return jax.lax.psum(view, over)
            for axes, groups in turns:
                view = jax.lax.psum_scatter(
                    view,
                    axes,
                    scatter_dimension=dim,
                    tiled=True,
                    axis_index_groups=groups,
                )
            return view

        return self._as_kept(on_placed_shards(reduce, leaf)(view))

    def _groups(
        self, axes: tuple[str, ...], leaf: LeafSharding
    ) -> list[tuple[Any, Any]]:
        """What to gather or reduce over in turn: axes, and groups of their indices."""
        # XLA joins small leaves with large ones of the same groups, and then makes an
        # all-reduce of both.
        small = math.prod(leaf.shape) < _BY_DIM
        if axes != (DATA,) or not self.torus or small:
            return [(axes, None)]
        dims = range(len(self.torus))
        return [(DATA, groups_along(self.torus, dim)) for dim in dims]

    def reduce_replicas(self, leaf: LeafSharding, view: jax.Array) -> jax.Array:
        """All-reduce, or reduce-scatter; once a step, and of a shard."""
        over, dim = leaf.reduced_between, leaf.view_data_dim
        if not over:
            return view
        reduce = functools.partial(jax.lax.psum, axis_name=over)
        if leaf.over_replicas and dim is not None:
            scatter = functools.partial(jax.lax.psum_scatter, axis_name=over)
            reduce = functools.partial(scatter, scatter_dimension=dim, tiled=True)
        sent = view.astype(self.communicated_dtype(view.dtype))
        return self._as_kept(on_placed_shards(reduce, leaf)(sent))

    def _as_kept(self, reduced: jax.Array) -> jax.Array:
        """Give a reduced gradient the memory layout of its parameter.

        NCCL scatters along the first dim in memory, so XLA makes the data dim the
        first. Without the constraint XLA would use that layout for parameters and
        moments too; the update is then not in place and copies the state (jax 0.11.2).
        """
        if self.platform != "gpu":
            return reduced
        return row_major(reduced)

    def communicated_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """`reduce_dtype`, or the one that the platform needs."""
        return wire_dtype(self.reduce_dtype, self.platform)

    def total(self, value: jax.Array) -> jax.Array:
        """All-reduce."""
        return jax.lax.psum(value, self.axes)

    def total_of_shards(self, leaf: LeafSharding, value: jax.Array) -> jax.Array:
        """All-reduce over the axes that split the leaf."""
        axes = tuple(axis for entry in leaf.batch_spec for axis in axes_of(entry))
        return jax.lax.psum(value, axes) if axes else value

    def largest(self, value: jax.Array) -> jax.Array:
        """All-reduce."""
        return jax.lax.pmax(value, self.axes)

    def shard_number(self) -> jax.Array:
        """The index on the batch axes."""
        return jax.lax.axis_index(self.axes)

    def on_devices(
        self, fn: Callable[..., jax.Array], leaf: LeafSharding, *, as_view: bool
    ) -> Callable[..., jax.Array]:
        """See `Collectives`."""
        inner, own = (PIPE, TENSOR), leaf.view_spec(data=False)

        def run(number: jax.Array, *views: jax.Array) -> jax.Array:
            def on_device(outer: jax.Array, *given: jax.Array) -> jax.Array:
                count = jax.lax.axis_size(inner)
                return fn(outer * count + jax.lax.axis_index(inner), *given)

            return jax.shard_map(
                on_device,
                in_specs=(P(), P(), *[own] * len(views)),
                out_specs=own if as_view else P(),
                axis_names=set(inner),
                check_vma=False,
            )(self.shard_number(), number, *views)

        return run


@dataclasses.dataclass(frozen=True)
class AutomaticCollectives:
    """Sharding constraints only, for a body that sees the full micro-batch."""

    def gather(self, leaf: LeafSharding, shard: jax.Array) -> jax.Array:
        """Constrain to the stored spec, then to the compute spec."""
        stored = constrain(shard, *leaf.view_spec())
        # In two steps: in one, every tensor shard would be gathered over data as well.
        over_tensor = constrain(stored, *leaf.view_spec(data=False))
        return as_computed(leaf, over_tensor)

    def reduce(self, leaf: LeafSharding, whole: jax.Array) -> jax.Array:
        """Constrain to the stored spec; the compiler inserts the sum."""
        return constrain(_as_made(leaf, whole), *leaf.view_spec())

    def gather_replicas(self, leaf: LeafSharding, shard: jax.Array) -> jax.Array:
        """The leaf itself: `gather` does it."""
        del leaf
        return shard

    def reduce_replicas(self, leaf: LeafSharding, view: jax.Array) -> jax.Array:
        """The gradient itself: the compiler has summed it over all rows."""
        del leaf
        return view

    def communicated_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """The same dtype: the compiler reduces gradients as they are computed."""
        return dtype

    def total(self, value: jax.Array) -> jax.Array:
        """The value itself: it is global."""
        return value

    def total_of_shards(self, leaf: LeafSharding, value: jax.Array) -> jax.Array:
        """The value itself: it is global."""
        del leaf
        return value

    def largest(self, value: jax.Array) -> jax.Array:
        """The value itself: it is global."""
        return value

    def shard_number(self) -> jax.Array:
        """0: one shard has all rows."""
        return jnp.int32(0)

    def on_devices(
        self, fn: Callable[..., jax.Array], leaf: LeafSharding, *, as_view: bool
    ) -> Callable[..., jax.Array]:
        """See `Collectives`."""
        axes, own = jax.sharding.get_abstract_mesh().axis_names, leaf.view_spec()

        def on_device(*given: jax.Array) -> jax.Array:
            return fn(jax.lax.axis_index(axes), *given)

        def run(number: jax.Array, *views: jax.Array) -> jax.Array:
            return jax.shard_map(
                on_device,
                in_specs=(P(), *[own] * len(views)),
                out_specs=own if as_view else P(),
                check_vma=False,
            )(number, *views)

        return run


def wire_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """The dtype of a reduction over a manual axis: fp32 on CPUs.

    XLA:CPU aborts the process on a bf16 reduction while another axis is automatic (seen
    on jax 0.10.2, 0.11.2 and 0.12.0.1).
    """
    return jnp.dtype(jnp.float32) if platform == "cpu" else jnp.dtype(dtype)


def local_view(leaf: LeafSharding, grad: jax.Array) -> jax.Array:
    """Reshape a data shard's own gradient to the leaf's view, before data splits it."""
    return constrain(_as_made(leaf, grad), *leaf.view_spec(data=False))


def on_placed_shards(
    collectives: Callable[..., Any], leaf: LeafSharding
) -> Callable[..., Any]:
    """Run manual collectives over data on each pipe and tensor shard of views.

    The compiler does not look into a manual collective: where another axis is
    automatic, it first gathers the operand over that axis (jax 0.10.2 to 0.12.0.1).

    Args:
      collectives: a function of arrays that are sharded as the leaf's view is, such as
        a `local_view`; its results have the same dims.
      leaf: the leaf.
    """
    if not any(leaf.placed):
        return collectives
    spec = leaf.view_spec(data=False)
    return jax.shard_map(
        collectives,
        in_specs=spec,
        out_specs=spec,
        axis_names={PIPE, TENSOR},
        check_vma=False,
    )


def as_computed(leaf: LeafSharding, view: jax.Array) -> jax.Array:
    """Bring a view that is gathered over data to its leaf's compute spec."""
    kept = (
        axes_of(entry) if stored else ()
        for entry, stored in zip(leaf.compute, leaf.placed, strict=True)
    )
    view = constrain(view, *leaf.in_view(list(kept)))
    return constrain(view.reshape(leaf.shape), *leaf.compute)


def _as_made(leaf: LeafSharding, grad: jax.Array) -> jax.Array:
    """Reshape a gradient to its leaf's view, at the compute spec.

    Without the constraint the compiler propagates the stored sharding into the backward
    pass, and splits activations over tensor along the width.
    """
    return constrain(grad, *leaf.compute).reshape(leaf.view_shape)


def to_view(sharded: LeafSharding, leaf: jax.Array) -> jax.Array:
    """Reshape a stored leaf to its view, in automatic mode; no data moves.

    What is in host memory stays there, and is not constrained.
    """
    if jax.typeof(leaf).memory_space == jax.memory.Space.Host:
        return leaf.reshape(sharded.view_shape)
    return constrain(leaf.reshape(sharded.view_shape), *sharded.view_spec())


def from_view(leaf: LeafSharding, view: jax.Array) -> jax.Array:
    """Undo `to_view`."""
    return constrain(view.reshape(leaf.shape), *leaf.stored_spec)


def manual_spec(leaf: LeafSharding) -> P:
    """A view's spec, for ``shard_map`` with the batch axes manual."""
    return leaf.batch_spec


def row_major(x: jax.Array) -> jax.Array:
    """Have the compiler store an array in the order of its dims."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
