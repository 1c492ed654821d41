"""How does a model constrain an activation's sharding in any tracing mode?

The engine runs most losses with the data axis *manual* (inside ``jax.shard_map``)
and some in *automatic* mode; outside the engine there may be no mesh at all. A bare
``with_sharding_constraint`` fails in two of the three; `constrain` works in all.
"""

import contextlib
import traceback
from collections.abc import Iterator

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import AXES, DATA, batch_axes
from jaxpar.sharding.rules import AxisRules
from jaxpar.sharding.tensor import AXIS_NAMES


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Constrain an array's sharding on the automatic mesh axes.

    One entry per dim: a mesh axis, a tuple of them, or None for an unsharded dim;
    missing trailing entries mean None. "data" is the rows of a batch: all axes of the
    mesh that split them. Manual axes are dropped, because the array is
    already this shard's piece; with no mesh in context, `x` is returned unchanged.

    Args:
      x: an array of any shape.
      *axes: mesh axes by dim, such as ``constrain(x_BTD, "data", "tensor")``.

    Returns:
      `x`, with its sharding constrained.

    Raises:
      ValueError: if an axis is not in the mesh, or there are more entries than dims.

    Example:
      >>> import jax.numpy as jnp
      >>> constrain(jnp.ones((4, 2)), "data").shape
      (4, 2)
    """
    mesh = jax.sharding.get_abstract_mesh()
    if DATA in mesh.axis_names:
        rows = batch_axes(mesh)
        split = [(entry,) if isinstance(entry, str) else entry or () for entry in axes]
        axes = tuple(
            tuple(own for axis in entry for own in (rows if axis == DATA else (axis,)))
            for entry in split
        )
    return constrain_axes(x, *axes)


def constrain_axes(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """As `constrain`, but "data" is the mesh axis of that name only."""
    if len(axes) > x.ndim:
        raise ValueError(
            f"constrain: axes={axes} has {len(axes)} entries for an array of "
            f"{x.ndim} dims (shape {x.shape}); give at most one entry per dim."
        )
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    placed = _placed(mesh)
    entries = [_placed_axes(entry, placed, mesh.axis_names) for entry in axes]
    if not placed or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, P(*entries))


def rows_are_automatic() -> bool:
    """Whether the compiler places the rows of a batch, over several devices.

    So it is in a coupled loss: gradients are then reduced where the compiler finds the
    reduction, which is behind the matmul that a parameter is in alone.
    """
    mesh = jax.sharding.get_abstract_mesh()
    placed = _placed(mesh)
    return any(axis in placed and mesh.shape[axis] > 1 for axis in batch_axes(mesh))


@contextlib.contextmanager
def own_constraints() -> Iterator[None]:
    """Add a remedy to the error of a bare ``with_sharding_constraint``.

    Example:
      >>> with own_constraints():
      ...     jax.lax.with_sharding_constraint(jax.numpy.ones(4), P("data"))
      Traceback (most recent call last):
      RuntimeError: with_sharding_constraint requires a non-empty mesh in context...
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if any(frame.name == "with_sharding_constraint" for frame in frames):
            error.add_note(
                "A bare with_sharding_constraint fails where no mesh is in context, "
                "and on manual axes, as data is in most losses. Use "
                'jaxpar.constrain(x, "data", None, "tensor") instead, with an axis or '
                "None for each dim: it works in all of these cases."
            )
        raise


def placed_rules(axis_rules: AxisRules) -> AxisRules:
    """Flax's axis rules, for activations on the mesh in context.

    ``with_logical_constraint`` fails for an axis that the mesh does not have, or that
    is manual; such a dim is left to the compiler.

    Args:
      axis_rules: pairs of a logical name and mesh axes, by any of `AXIS_NAMES`.

    Returns:
      Pairs of a logical name and axes of this mesh.

    Example:
      >>> placed_rules((("batch", "data"), ("embed", None)))
      (('batch', UNCONSTRAINED), ('embed', None))
    """
    placed = _placed(jax.sharding.get_abstract_mesh())
    found = []
    for name, axes in axis_rules:
        entry = (axes,) if isinstance(axes, str) else tuple(axes or ())
        own = dict.fromkeys(AXIS_NAMES.get(axis) for axis in entry)
        kept = tuple(axis for axis in own if axis in placed)
        found.append((name, kept or (P.UNCONSTRAINED if entry else None)))
    return tuple(found)


def _placed(mesh: jax.sharding.AbstractMesh) -> set[str]:
    """The mesh's automatic axes."""
    if mesh.empty:
        return set()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Auto}


def _placed_axes(
    entry: str | tuple[str, ...] | None,
    placed: set[str],
    known: tuple[str, ...],
) -> tuple[str, ...] | None:
    names = (entry,) if isinstance(entry, str) else (entry or ())
    for name in names:
        if name not in known and name in AXES:
            continue  # The mesh has one device on it.
        if name not in known:
            raise ValueError(
                f"constrain: axis {name!r} is not an axis of the mesh; "
                f"use one of {', '.join(map(repr, known))}."
            )
    return tuple(name for name in names if name in placed) or None
