"""How is a kernel called that the compiler can't split: on each device's own shard.

Attention needs no other heads and no other rows of the batch, so a call can be mapped
over the mesh axes that heads and rows are sharded over.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType

from jaxpar.mesh import BATCH_AXES, TENSOR, entry_of
from jaxpar.sharding.rules import axes_of


class Split(NamedTuple):
    """Mesh axes; None where there is none to map over."""

    heads: str | None
    rows: str | tuple[str, ...] | None


def split_of(query_BTNH: jax.Array, key_BSKH: jax.Array) -> Split:
    """Find the axes that heads and rows are sharded over here.

    Args:
      query_BTNH: queries.
      key_BSKH: keys; every device must have a whole number of their heads.

    Returns:
      The axes, among the automatic ones.
    """
    mesh = jax.sharding.get_abstract_mesh()
    placed = {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and mesh.shape[name] > 1
    }
    split_heads = TENSOR in placed and key_BSKH.shape[2] % placed[TENSOR] == 0
    rows = tuple(axis for axis in BATCH_AXES if axis in placed)
    ways = math.prod(placed[axis] for axis in rows)
    split_rows = entry_of(rows) if query_BTNH.shape[0] % ways == 0 else None
    return Split(TENSOR if split_heads else None, split_rows)


def on_pieces(
    call: Callable[..., Any], ins: tuple[Any, ...], outs: Any, split: Split
) -> Callable[..., Any]:
    """Map a call over the axes that its operands are sharded over.

    Args:
      call: computes on one device's shard.
      ins: the spec of each operand, on the axes of `split`.
      outs: those of the results.
      split: the result of `split_of`.

    Returns:
      The call on unsharded operands.
    """
    names = {axis for entry in split for axis in axes_of(entry)}
    if not names:
        return call
    return jax.shard_map(
        call, in_specs=ins, out_specs=outs, axis_names=names, check_vma=False
    )
