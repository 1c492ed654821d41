"""How are partial results of split rows joined: outside the kernels, in XLA."""

import jax
import jax.numpy as jnp

from kernels_pallas.block_sparse_attention.lists import Lists


def join_attention(
    whole: tuple[jax.Array, jax.Array],
    parts: tuple[jax.Array, jax.Array],
    lists: Lists,
    first_head: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Join the softmaxes of split rows, weighted by their sums.

    Args:
      whole: results [B, T, N, H] and logarithms to base 2 of the sums [B, N, T], of
        rows that are not split.
      parts: partial results [B, N, P, tile, H] and logarithms [B, N, P, tile].
      lists: say which part belongs to which row.
      first_head: the first present head of the tile work's; None if all are present.

    Returns:
      Both, with the split rows in their places.
    """
    o, lse = whole
    parts_o, parts_lse = parts
    batch, heads, _, tile, size = parts_o.shape
    part_row, split_row = _of_heads(lists, heads, first_head)

    def of_head(o, lse, parts_o, parts_lse, part_row, split_row):
        top = jnp.full((split_row.shape[0], tile), -jnp.inf)
        top = top.at[part_row].max(parts_lse, mode="drop")
        finite = jnp.where(jnp.isfinite(top), top, 0.0)
        weights = jnp.exp2(parts_lse - finite.at[part_row].get(mode="clip"))
        total = jnp.zeros_like(top).at[part_row].add(weights, mode="drop")
        sums = jnp.zeros((*top.shape, size))
        sums = sums.at[part_row].add(weights[..., None] * parts_o, mode="drop")
        joined = sums / jnp.where(total > 0, total, 1.0)[..., None]
        o = o.at[split_row].set(joined.astype(o.dtype), mode="drop")
        return o, lse.at[split_row].set(finite + jnp.log2(total), mode="drop")

    tiled_o = o.reshape(batch, -1, tile, heads, size).transpose(0, 3, 1, 2, 4)
    tiled_lse = lse.reshape(batch, heads, -1, tile)
    over_heads = jax.vmap(of_head)
    over_batch = jax.vmap(over_heads, in_axes=(0, 0, 0, 0, None, None))
    o, lse = over_batch(tiled_o, tiled_lse, parts_o, parts_lse, part_row, split_row)
    o = o.transpose(0, 2, 3, 1, 4).reshape(batch, -1, heads, size)
    return o, lse.reshape(batch, heads, -1)


def join_sums(
    whole: jax.Array, parts: jax.Array, lists: Lists, first_head: jax.Array | None
) -> jax.Array:
    """Sum the partial sums of split rows.

    Args:
      whole: [B, T, N, H], of rows that are not split.
      parts: [B, N, P, tile, H].
      lists: say which part belongs to which row.
      first_head: the first present head of the tile work's; None if all are present.

    Returns:
      The sums, with the split rows in their places.
    """
    batch, heads, _, tile, size = parts.shape
    part_row, split_row = _of_heads(lists, heads, first_head)

    def of_head(whole, parts, part_row, split_row):
        sums = jnp.zeros((split_row.shape[0], tile, size))
        sums = sums.at[part_row].add(parts, mode="drop")
        return whole.at[split_row].set(sums.astype(whole.dtype), mode="drop")

    tiled = whole.reshape(batch, -1, tile, heads, size).transpose(0, 3, 1, 2, 4)
    over_batch = jax.vmap(jax.vmap(of_head), in_axes=(0, 0, None, None))
    tiled = over_batch(tiled, parts, part_row, split_row)
    return tiled.transpose(0, 2, 3, 1, 4).reshape(batch, -1, heads, size)


def _of_heads(
    lists: Lists, heads: int, first_head: jax.Array | None
) -> list[jax.Array]:
    """The split row of each part, and its row number, for every head."""
    found = []
    for x in (lists.part_row, lists.split_row):
        if len(x) == 1:
            found.append(jnp.broadcast_to(jnp.asarray(x), (heads, x.shape[1])))
        else:
            first = 0 if first_head is None else first_head
            found.append(jax.lax.dynamic_slice_in_dim(jnp.asarray(x), first, heads))
    return found
