"""How is a batch placed: checked against the sample, its rows sharded over data.

Each process passes its own rows (global / number of processes, in process order). A
`jax.Array` is a global array; another framework's tensor is treated as a NumPy array.
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
from jaxpar.engine.place_rows import agree_on_rows, gather_rows, place_own, place_same
from jaxpar.engine.tensors import as_array, is_tensor
from jaxpar.mesh import batch_axes, num_batch_shards, rows_spec
from jaxpar.step.inputs import Packed, replicated_names
from jaxpar.types import Batch


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """The shapes and shardings of a global batch.

    Attributes:
      leaves: leaf name -> global shape and dtype.
      structure: the batch's tree structure.
      num_rows: examples in the global batch.
      mesh: the mesh whose batch axes split the rows.
      replicated: names of leaves that are not rows (`jaxpar.Replicated`).
    """

    leaves: Mapping[str, jax.ShapeDtypeStruct]
    structure: Any
    num_rows: int
    mesh: Mesh
    replicated: frozenset[str] = frozenset()

    @property
    def sharding(self) -> NamedSharding:
        """Rows sharded over the batch axes, replicated over the other axes."""
        return NamedSharding(self.mesh, rows_spec(self.mesh))

    @property
    def shardings(self) -> Batch:
        """A global batch's tree of shardings."""
        places = [self._place(name) for name in self.leaves]
        return jax.tree.unflatten(self.structure, places)

    def rows(self, num_rows: int) -> Batch:
        """Shapes of a batch with another number of rows."""
        structs = [
            jax.ShapeDtypeStruct(self._shape(name, num_rows), leaf.dtype)
            for name, leaf in self.leaves.items()
        ]
        return jax.tree.unflatten(self.structure, structs)

    def num_calls(self, accumulate: int) -> int:
        """Calls of the loss function in a step of `accumulate` micro-batches."""
        if isinstance(self.rows(1), Packed):
            return self.num_rows
        return num_batch_shards(self.mesh) * accumulate

    def structs(self) -> Batch:
        """Shapes, dtypes and shardings of a global batch."""
        structs = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._place(name))
            for name, leaf in self.leaves.items()
        ]
        return jax.tree.unflatten(self.structure, structs)

    def _place(self, name: str) -> NamedSharding:
        spec = P() if name in self.replicated else rows_spec(self.mesh)
        return NamedSharding(self.mesh, spec)

    def _shape(self, name: str, num_rows: int) -> tuple[int, ...]:
        shape = self.leaves[name].shape
        return shape if name in self.replicated else (num_rows, *shape[1:])

    def fits(self, batch: Batch, *, any_rows: bool = False) -> bool:
        """Whether a batch has these shapes.

        Args:
          batch: as for `put`.
          any_rows: whether its rows may be of any number, as for `put_any`.
        """
        leaves, structure = jax.tree.flatten(batch)
        if structure != self.structure:
            return False
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
        for name, leaf, shape in zip(self.leaves, leaves, shapes, strict=True):
            is_all = isinstance(leaf, jax.Array)
            own = self.num_rows // (1 if is_all else jax.process_count())
            right = self._shape(name, own)
            is_rows = name not in self.replicated and len(shape) > 0
            if shape != right and not (any_rows and is_rows and shape[1:] == right[1:]):
                return False
        return True

    @property
    def num_elements(self) -> int:
        """Elements of a global batch."""
        return sum(leaf.size for leaf in self.leaves.values())

    def __str__(self) -> str:
        """The global shapes, by leaf."""
        return ", ".join(
            f"{name or 'batch'} {leaf.dtype}{list(leaf.shape)}"
            for name, leaf in self.leaves.items()
        )

    def put(self, batch: Batch) -> Batch:
        """Check a batch and make it a global array on the mesh.

        Args:
          batch: this process's rows (NumPy arrays, or tensors that support DLPack), or
            global `jax.Array`s.

        Returns:
          Global arrays, rows over data.

        Raises:
          ValueError: if structure, shapes or dtypes differ from the sample batch.
        """
        leaves = self._leaves(batch)
        self._check(leaves, self.num_rows // jax.process_count(), self.num_rows)
        return self._placed(leaves, self.num_rows)

    def put_any(
        self, batch: Batch, *, whole: bool
    ) -> tuple[Batch | None, Batch | None]:
        """Check a batch of any number of rows and place it, in two parts.

        Args:
          batch: as for `put`; processes may have different numbers of rows.
          whole: whether to replicate all rows if data does not divide their number.

        Returns:
          The rows that data divides, sharded over data, and the left-over rows,
          replicated on every device; None for a part without rows.

        Raises:
          ValueError: as `put`, or if no process has a row.
        """
        leaves, counts = self._counted(batch)
        num_rows = sum(counts)
        if not num_rows:
            raise ValueError("batch: it has no rows, on any process; pass one or more.")
        own = counts[jax.process_index() if len(counts) > 1 else 0]
        self._check(leaves, own, num_rows)
        left = num_rows % num_batch_shards(self.mesh)
        if not left and len(set(counts)) == 1:
            return self._placed(leaves, num_rows), None
        split = 0 if whole and left else num_rows - left
        gathered = {
            name: leaf if name in self.replicated else gather_rows(leaf, counts)
            for name, leaf in leaves.items()
        }

        def part(some: slice, spec: P) -> Batch:
            over, everywhere = (NamedSharding(self.mesh, x) for x in (spec, P()))
            placed = [
                place_same(leaf, everywhere)
                if name in self.replicated
                else place_same(leaf[some], over)
                for name, leaf in gathered.items()
            ]
            return jax.tree.unflatten(self.structure, placed)

        return (
            part(slice(split), rows_spec(self.mesh)) if split else None,
            part(slice(split, None), P()) if left else None,
        )

    def _counted(self, batch: Batch) -> tuple[dict[str, Any], list[int]]:
        """The batch's arrays, checked, and the rows of each process.

        For global arrays every process knows the rows. Otherwise processes exchange
        their numbers; one with an invalid batch sends -1, so the others do not hang.
        """
        leaves, num_own, refused = {}, -1, None
        try:
            leaves = self._leaves(batch)
            rows = [
                leaf for name, leaf in leaves.items() if name not in self.replicated
            ]
            own = next((x for x in rows if not isinstance(x, jax.Array)), rows[0])
            num_own = (*np.shape(own), 0)[0]
            if np.ndim(own):  # A scalar has no rows.
                hosts = {
                    k: x for k, x in leaves.items() if not isinstance(x, jax.Array)
                }
                self._check(hosts, num_own, num_own)
        except ValueError as error:
            refused = error
        wholes = replicated_names(batch)
        given = [
            x for name, x in tree.named_leaves(batch).items() if name not in wholes
        ]
        if all(isinstance(leaf, jax.Array) for leaf in given):
            counts = [num_own]
        else:
            counts = agree_on_rows(-1 if refused else num_own)
        if refused:
            raise refused
        if -1 in counts:
            raise ValueError(
                f"batch: process {counts.index(-1)} has an invalid batch, see its "
                "error; this process's batch is valid."
            )
        return leaves, counts

    def _leaves(self, batch: Batch) -> dict[str, Any]:
        """The batch's arrays, if it has the sample's structure."""
        leaves, structure = jax.tree.flatten(batch)
        if structure != self.structure:
            _refuse_lists("batch", batch)
            raise ValueError(
                f"batch: its structure {structure} differs from the sample batch's "
                f"{self.structure}. Pass the same leaves as in sample_batch."
            )
        return {
            name: _numeric(
                "batch", name, leaf, self.mesh, is_whole=name in self.replicated
            )
            for name, leaf in zip(self.leaves, leaves, strict=True)
        }

    def _check(self, leaves: Mapping[str, Any], num_own: int, num_rows: int) -> None:
        """Compare each leaf with the sample's, for `num_own` of `num_rows` rows."""
        for name, leaf in leaves.items():
            struct, is_rows = self.leaves[name], name not in self.replicated
            is_all = isinstance(leaf, jax.Array) or jax.process_count() == 1
            needed = self._shape(name, num_rows if is_all else num_own)
            is_dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) == struct.dtype
            if leaf.shape == needed and is_dtype:
                continue
            dtype = struct.dtype if is_dtype else leaf.dtype
            whose = f", this process's of {num_rows} rows" if is_rows else ""
            raise ValueError(
                f"batch: leaf {name or 'batch'} is {dtype}{list(leaf.shape)}, but must "
                f"be {struct.dtype}{list(needed)}{'' if is_all else whose}, as in "
                "sample_batch."
            )

    def _placed(self, leaves: Mapping[str, Any], num_rows: int) -> Batch:
        placed = [
            place_same(leaf, self._place(name))
            if name in self.replicated
            else place_own(leaf, num_rows, self.mesh)
            for name, leaf in leaves.items()
        ]
        return jax.tree.unflatten(self.structure, placed)


def make_batch_spec(
    sample_batch: Batch,
    mesh: Mesh,
    accumulate: int,
    *,
    argument: str = "sample_batch",
) -> BatchSpec:
    """Read the shapes of a global batch.

    Args:
      sample_batch: arrays or `jax.ShapeDtypeStruct`s, each with the rows first.
      mesh: the mesh.
      accumulate: micro-batches a step.
      argument: of `jaxpar.initialize`, for messages.

    Returns:
      The spec.

    Raises:
      ValueError: if leaves are not arrays of numbers, have no rows or different numbers
        of rows, data x accumulate does not divide the rows, or accumulate is not
        positive.
    """
    if not isinstance(accumulate, numbers.Integral) or accumulate < 1:
        raise ValueError(
            f"accumulate={accumulate!r} must be a positive number of micro-batches."
        )
    _refuse_lists(argument, sample_batch)
    wholes = replicated_names(sample_batch)
    arrays = {
        name: _numeric(argument, name, leaf, mesh, is_whole=name in wholes)
        for name, leaf in tree.named_leaves(sample_batch).items()
    }
    leaves = {
        name: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
        for name, x in arrays.items()
    }
    rows = {
        name: leaf.shape[0] if leaf.shape else None
        for name, leaf in leaves.items()
        if name not in wholes
    }
    if not rows or None in rows.values() or len(set(rows.values())) > 1:
        raise ValueError(
            f"{argument}: rows by leaf are {rows}; every leaf must have the same "
            "number of rows as its leading dim (at least one leaf). Wrap values that "
            "are not rows: jaxpar.Replicated(x)."
        )
    (num_rows,) = set(rows.values())
    data, over = num_batch_shards(mesh), " x ".join(batch_axes(mesh))
    if not num_rows or num_rows % (data * accumulate):
        raise ValueError(
            f"{argument}: {num_rows} rows must be a multiple of {over} x accumulate "
            f"= {data} x {accumulate} = {data * accumulate}. Change the batch, the "
            "mesh or accumulate."
        )
    structure = jax.tree.structure(sample_batch)
    return BatchSpec(leaves, structure, num_rows, mesh, wholes)


def _refuse_lists(argument: str, batch: Batch) -> None:
    """Raise for a list or tuple of numbers: JAX would make every number a leaf."""
    for name, leaf in tree.named_leaves(batch, is_leaf=_is_list_of_numbers).items():
        if _is_list_of_numbers(leaf):
            raise ValueError(
                f"{argument}: leaf {name or 'batch'} is a {type(leaf).__name__} of "
                "numbers, not an array; convert it with np.asarray."
            )


def _is_list_of_numbers(node: Any) -> bool:
    if not isinstance(node, list | tuple) or not node:
        return False
    return all(isinstance(x, numbers.Number) or _is_list_of_numbers(x) for x in node)


def _numeric(argument: str, name: str, leaf: Any, mesh: Mesh, *, is_whole: bool) -> Any:
    """Check an array of numbers; convert another framework's tensor.

    A replicated leaf may also be a Python number.
    """
    if is_whole and isinstance(leaf, bool | int | float):
        return np.asarray(leaf)
    if is_tensor(leaf):
        platform = mesh.devices.flat[0].platform
        leaf = as_array(leaf, f"{argument}: leaf {name or 'batch'}", platform)
    dtype, kinds = getattr(leaf, "dtype", None), (np.number, np.bool_)
    if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        found = dtype or type(leaf).__name__
        raise ValueError(
            f"{argument}: leaf {name or 'batch'} is {found}, not an array of numbers; "
            "convert it with np.asarray, or leave it out."
        )
    return leaf
