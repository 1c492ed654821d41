"""How does a model say where an activation lies, whatever mode it is traced in?

The engine runs most losses with the data axis *manual* (inside ``jax.shard_map``)
and some in *automatic* mode; outside the engine there may be no mesh at all. A bare
``with_sharding_constraint`` fails in two of the three; `constrain` is right in all.
"""

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Constrain an array's layout on the mesh axes that the compiler places.

    One entry per dim: a mesh axis, a tuple of them, or None for a dim kept whole;
    missing trailing entries mean None. Axes that are manual here are dropped, for the
    array is already this shard's piece of them; with no mesh in context, `x` comes
    back as it is.

    Args:
      x: an array of any shape.
      *axes: mesh axes by dim, such as ``constrain(x_BTD, "data", "tensor")``.

    Returns:
      `x`, with its layout constrained.

    Raises:
      ValueError: if an axis is not one of the mesh's, or there are more entries than
        dims.

    Example:
      >>> import jax.numpy as jnp
      >>> constrain(jnp.ones((4, 2)), "data").shape
      (4, 2)
    """
    if len(axes) > x.ndim:
        raise ValueError(
            f"constrain: axes={axes} has {len(axes)} entries for an array of "
            f"{x.ndim} dims (shape {x.shape}); give at most one entry per dim."
        )
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    placed = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }
    entries = [_placed_axes(entry, placed, mesh.axis_names) for entry in axes]
    if not placed or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, P(*entries))


def _placed_axes(
    entry: str | tuple[str, ...] | None,
    placed: set[str],
    known: tuple[str, ...],
) -> tuple[str, ...] | None:
    names = (entry,) if isinstance(entry, str) else (entry or ())
    for name in names:
        if name not in known:
            raise ValueError(
                f"constrain: axis {name!r} is not an axis of the mesh; "
                f"use one of {', '.join(map(repr, known))}."
            )
    return tuple(name for name in names if name in placed) or None
