"""How is a kernel called that the compiler can't split: on each device's own shard.

Attention needs no other heads and no other rows of the batch, so a call can be mapped
over the mesh axes that heads and rows are sharded over.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType

from jaxpar.mesh import DATA, TENSOR


class Split(NamedTuple):
    """Mesh axes; None where there is none to map over."""

    heads: str | None
    rows: str | None


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
    split_rows = DATA in placed and query_BTNH.shape[0] % placed[DATA] == 0
    return Split(TENSOR if split_heads else None, DATA if split_rows else None)


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
    names = {axis for axis in split if axis is not None}
    if not names:
        return call
    return jax.shard_map(
        call, in_specs=ins, out_specs=outs, axis_names=names, check_vma=False
    )
