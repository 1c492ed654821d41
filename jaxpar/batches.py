"""How does a batch reach the devices: checked against the sample, rows over data.

Each process passes its own rows (global / number of processes, in process order); a
`jax.Array` is taken as global, another framework's tensor as NumPy's.
"""

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import tree
from jaxpar.inputs import replicated_names
from jaxpar.mesh import AXES, DATA
from jaxpar.tensors import as_array, is_tensor
from jaxpar.types import Batch


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """The shapes of a global batch and where its rows go.

    Attributes:
      leaves: leaf name -> global shape and dtype.
      structure: the batch's tree structure.
      num_rows: examples in the global batch.
      mesh: the mesh whose data axis splits the rows.
      replicated: names of leaves that are not rows (`jaxpar.Replicated`).
    """

    leaves: Mapping[str, jax.ShapeDtypeStruct]
    structure: Any
    num_rows: int
    mesh: Mesh
    replicated: frozenset[str] = frozenset()

    @property
    def sharding(self) -> NamedSharding:
        """Rows over data, whole over the other axes."""
        return NamedSharding(self.mesh, P(DATA))

    @property
    def shardings(self) -> Batch:
        """Where a global batch is: a tree of shardings."""
        places = [self._place(name) for name in self.leaves]
        return jax.tree.unflatten(self.structure, places)

    def rows(self, num_rows: int) -> Batch:
        """Shapes of a batch with another number of rows."""
        structs = [
            jax.ShapeDtypeStruct(self._shape(name, num_rows), leaf.dtype)
            for name, leaf in self.leaves.items()
        ]
        return jax.tree.unflatten(self.structure, structs)

    def structs(self) -> Batch:
        """Shapes, dtypes and shardings of a global batch."""
        structs = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._place(name))
            for name, leaf in self.leaves.items()
        ]
        return jax.tree.unflatten(self.structure, structs)

    def _place(self, name: str) -> NamedSharding:
        spec = P() if name in self.replicated else P(DATA)
        return NamedSharding(self.mesh, spec)

    def _shape(self, name: str, num_rows: int) -> tuple[int, ...]:
        shape = self.leaves[name].shape
        return shape if name in self.replicated else (num_rows, *shape[1:])

    def put(self, batch: Batch, *, any_size: bool = False) -> Batch:
        """Check a batch and make it a global array on the mesh.

        Args:
          batch: this process's rows (NumPy arrays, or tensors that DLPack takes), or
            global `jax.Array`s.
          any_size: accept another number of rows that data divides.

        Returns:
          Global arrays, rows over data.

        Raises:
          ValueError: if structure, shapes or dtypes differ from the sample batch, or
            the rows are none or do not divide by data.
        """
        leaves, structure = jax.tree.flatten(batch)
        if structure != self.structure:
            _refuse_lists("batch", batch)
            raise ValueError(
                f"batch: its structure {structure} differs from the sample batch's "
                f"{self.structure}. Pass the same leaves as in sample_batch."
            )
        leaves = [
            _numeric("batch", name, leaf, self.mesh)
            for name, leaf in zip(self.leaves, leaves, strict=True)
        ]
        num_rows = self._num_rows(leaves) if any_size else self.num_rows
        placed = [
            self._put_leaf(name, leaf, num_rows)
            for name, leaf in zip(self.leaves, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, placed)

    def _num_rows(self, leaves: list) -> int:
        first = next(
            leaf
            for name, leaf in zip(self.leaves, leaves, strict=True)
            if name not in self.replicated
        )
        ways = 1 if isinstance(first, jax.Array) else jax.process_count()
        num_rows = (*np.shape(first), 0)[0] * ways
        if not num_rows or num_rows % self.mesh.shape[DATA]:
            raise ValueError(
                f"batch: {num_rows} rows do not divide by data="
                f"{self.mesh.shape[DATA]}; pass a positive multiple of it."
            )
        return num_rows

    def _put_leaf(self, name: str, leaf: Any, num_rows: int) -> jax.Array:
        struct, shape = self.leaves[name], np.shape(leaf)
        is_global = isinstance(leaf, jax.Array)
        own_rows = num_rows if is_global else num_rows // jax.process_count()
        needed = self._shape(name, own_rows)
        is_dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) == struct.dtype
        if shape != needed or not is_dtype:
            dtype = struct.dtype if is_dtype else leaf.dtype
            raise ValueError(
                f"batch: leaf {name or 'batch'} is {dtype}{list(shape)}, but must be "
                f"{struct.dtype}{list(needed)}, as in sample_batch "
                f"({own_rows} of {num_rows} rows on each of "
                f"{1 if is_global else jax.process_count()} processes)."
            )
        place = self._place(name)
        if is_global or jax.process_count() == 1:
            return jax.device_put(leaf, place)
        if name in self.replicated:
            return jax.make_array_from_process_local_data(place, leaf, shape)
        return self._from_processes(np.asarray(leaf), (num_rows, *shape[1:]))

    def _from_processes(self, rows: np.ndarray, shape: tuple[int, ...]) -> jax.Array:
        """Make a global array of rows that each process has its own part of."""
        start = jax.process_index() * len(rows)
        held = {
            row
            for index in self.sharding.addressable_devices_indices_map(shape).values()
            if index is not None
            for row in range(*index[0].indices(shape[0]))
        }
        if held == set(range(start, start + len(rows))):
            return jax.make_array_from_process_local_data(self.sharding, rows, shape)
        # Rows lie on other processes than the ones that read them (tensor or pipe
        # crosses processes): place them by process, then let XLA move them.
        grid = self.mesh.devices.reshape(-1)
        order = sorted(grid, key=lambda device: (device.process_index, device.id))
        by_process = Mesh(
            np.array(order).reshape(jax.process_count(), -1), ("process", AXES[-1])
        )
        own = NamedSharding(by_process, P("process"))
        placed = jax.make_array_from_process_local_data(own, rows, shape)
        return jax.device_put(placed, self.sharding)


def make_batch_spec(sample_batch: Batch, mesh: Mesh, accumulate: int) -> BatchSpec:
    """Read the shapes of a global batch.

    Args:
      sample_batch: arrays or `jax.ShapeDtypeStruct`s, each with the rows first.
      mesh: the mesh.
      accumulate: micro-batches a step.

    Returns:
      The spec.

    Raises:
      ValueError: if leaves are not arrays of numbers, have no rows or different numbers
        of them, or the rows do not divide by data x accumulate, or accumulate is not
        positive.
    """
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(
            f"accumulate={accumulate!r} must be a positive number of micro-batches."
        )
    _refuse_lists("sample_batch", sample_batch)
    arrays = {
        name: _numeric("sample_batch", name, leaf, mesh)
        for name, leaf in tree.named_leaves(sample_batch).items()
    }
    leaves = {
        name: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
        for name, x in arrays.items()
    }
    wholes = replicated_names(sample_batch)
    rows = {
        name: leaf.shape[0] if leaf.shape else None
        for name, leaf in leaves.items()
        if name not in wholes
    }
    if not rows or None in rows.values() or len(set(rows.values())) > 1:
        raise ValueError(
            f"sample_batch: rows by leaf are {rows}; every leaf must have the same "
            "number of rows as its leading dim (at least one leaf). Wrap what is not "
            "rows: jaxpar.Replicated(x)."
        )
    (num_rows,) = set(rows.values())
    data = mesh.shape[DATA]
    if not num_rows or num_rows % (data * accumulate):
        raise ValueError(
            f"sample_batch: {num_rows} rows must be a multiple of data x accumulate = "
            f"{data} x {accumulate} = {data * accumulate}. Change the batch, the mesh "
            "or accumulate."
        )
    structure = jax.tree.structure(sample_batch)
    return BatchSpec(leaves, structure, num_rows, mesh, wholes)


def _refuse_lists(argument: str, batch: Batch) -> None:
    """Refuse a list or tuple of numbers, whose every number would be a leaf."""
    for name, leaf in tree.named_leaves(batch, is_leaf=_is_list_of_numbers).items():
        if _is_list_of_numbers(leaf):
            raise ValueError(
                f"{argument}: leaf {name or 'batch'} is a {type(leaf).__name__} of "
                "numbers, not an array; pass np.asarray of it."
            )


def _is_list_of_numbers(node: Any) -> bool:
    if not isinstance(node, list | tuple) or not node:
        return False
    return all(isinstance(x, numbers.Number) or _is_list_of_numbers(x) for x in node)


def _numeric(argument: str, name: str, leaf: Any, mesh: Mesh) -> Any:
    """An array of numbers, taken from another framework where it is its tensor."""
    if is_tensor(leaf):
        platform = mesh.devices.flat[0].platform
        leaf = as_array(leaf, f"{argument}: leaf {name or 'batch'}", platform)
    dtype, kinds = getattr(leaf, "dtype", None), (np.number, np.bool_)
    if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        found = dtype or type(leaf).__name__
        raise ValueError(
            f"{argument}: leaf {name or 'batch'} is {found}, not an array of numbers; "
            "make it one by np.asarray, or leave it out."
        )
    return leaf
