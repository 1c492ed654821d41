"""What do users call: block-sparse attention with checked arguments."""

import dataclasses
import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.backend import Choice, choose
from kernels_pallas.block_sparse_attention import reference
from kernels_pallas.block_sparse_attention.operands import Limits
from kernels_pallas.block_sparse_attention.tile_work import Tile, TileWork
from kernels_pallas.block_sparse_attention.vjp import Implementation, attend

Segments = Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]]
"""One array for all tokens, or a pair for queries and keys."""

SIZES = (64, 128, 256)
"""Head sizes of the kernels; smaller heads are padded."""

KERNEL_TILE, LEAST_BLOCK = Tile(128, 128), 16


@overload
def block_sparse_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    work: TileWork,
    *,
    scale: float | None = None,
    segment_ids: Segments | None = None,
    kv_seq_lens: Int[Array, "B"] | None = None,
    first_head: Int[Array, ""] | None = None,
    deterministic: bool = True,
    return_lse: Literal[False] = False,
    implementation: Choice | None = None,
) -> Float[Array, "B T N H"]: ...


@overload
def block_sparse_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    work: TileWork,
    *,
    scale: float | None = None,
    segment_ids: Segments | None = None,
    kv_seq_lens: Int[Array, "B"] | None = None,
    first_head: Int[Array, ""] | None = None,
    deterministic: bool = True,
    return_lse: Literal[True],
    implementation: Choice | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]: ...


def block_sparse_attention(  # noqa: PLR0913 - what, by 7, and how, by 4
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    work: TileWork,
    *,
    scale: float | None = None,
    segment_ids: Segments | None = None,
    kv_seq_lens: Int[Array, "B"] | None = None,
    first_head: Int[Array, ""] | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    implementation: Choice | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Attend to the active blocks of a layout.

    Scores that the layout, causality and the limits exclude don't enter the softmax;
    scores of inactive blocks are not computed. A query that sees nothing gives 0, with
    a gradient of 0. Sums are in fp32. Call it under `jax.jit`: outside of one, the
    kernels are compiled again at each call.

    Args:
      q: queries.
      k: keys, in the dtype of `q`; K divides N, and each key head serves N / K query
        heads.
      v: values, in the dtype of `q`.
      work: the active blocks of T queries and S keys, by `make_tile_work`.
      scale: of the scores, above 0; None for 1 / sqrt(H).
      segment_ids: a query sees only keys of its own segment; a pair if queries and keys
        have different ones.
      kv_seq_lens: valid keys of each sequence, the first ones; None for all, like any
        number above S.
      first_head: if `q` has only some of the heads of `work`, the number of the
        first, a multiple of N / K; None if it has all.
      deterministic: whether the gradient is the same to the bit in every run. False
        allows the kernels to compute it in one pass, of five matmuls for seven, in
        which the gradient of `q` is summed in the order in which programs finish; that
        pass exists for heads up to 128.
      return_lse: also return the logarithm of each softmax's sum.
      implementation: the name of one; None for the fastest that runs here.

    Returns:
      The result, in the dtype of `q`; with `return_lse` also the logarithms, in fp32,
      -inf for a query that sees nothing.

    Raises:
      ValueError: if shapes or dtypes do not match each other or the work, or the
        requested implementation is unknown or does not run here.

    Example:
      >>> import numpy as np
      >>> from kernels_pallas.block_sparse_attention import BlockLayout, make_tile_work
      >>> layout = BlockLayout(np.tri(2, dtype=bool), block=128)
      >>> work = make_tile_work(layout, 256, 256, causal=True)
      >>> x = jax.random.normal(jax.random.key(0), (1, 256, 2, 64))
      >>> block_sparse_attention(x, x, x, work).shape
      (1, 256, 2, 64)
    """
    _check_shapes(q, k, v, work)
    _check_heads(q, k, work, is_part=first_head is not None)
    limits = _limits(q, k, segment_ids, kv_seq_lens)
    limits = dataclasses.replace(limits, first_head=first_head)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale}: must be above 0; otherwise negate q.")
    choice = choose(
        "block_sparse_attention",
        implementation,
        dtype=q.dtype,
        unsupported=_unsupported(q, work),
    )
    size = q.shape[3]
    if choice == "mosaic":
        q, k, v = (_filled_up(x) for x in (q, k, v))
    implement = _implementation(choice, deterministic=deterministic)
    both: Any = attend(q, k, v, limits, work, scale, implement)
    o, lse = both[0][..., :size], both[1]
    return (o, lse) if return_lse else o


def _implementation(choice: Choice, *, deterministic: bool) -> Implementation:
    if choice == "reference":
        return Implementation(reference.forward, reference.backward)
    # Some jax versions have no Mosaic GPU.
    from kernels_pallas.block_sparse_attention.mosaic import api  # noqa: PLC0415

    backward = api.backward if deterministic else api.backward_unordered
    return Implementation(api.forward, backward)


def _unsupported(q: jax.Array, work: TileWork) -> str | None:
    """Why the kernels can't compute this; None if they can."""
    if q.shape[3] > max(SIZES):
        return f"heads of {q.shape[3]} are larger than {max(SIZES)}"
    if work.tile != KERNEL_TILE:
        return f"the tile work's tile is {work.tile}, and the kernel's {KERNEL_TILE}"
    if work.block < LEAST_BLOCK:
        return f"blocks of {work.block} are smaller than {LEAST_BLOCK}"
    return None


def _filled_up(x: jax.Array) -> jax.Array:
    """Pad heads with zeros to a size of the kernels."""
    size = min(size for size in SIZES if size >= x.shape[3])
    missing = size - x.shape[3]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array, work: TileWork) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name}: has shape {x.shape}; it must be [batch, tokens, heads, head "
                "size]."
            )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v: are {q.dtype}, {k.dtype} and {v.dtype}; cast them to one "
            "dtype."
        )
    if k.shape != v.shape:
        raise ValueError(
            f"k and v: have shapes {k.shape} and {v.shape}; give equal ones."
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q and k: have shapes {q.shape} and {k.shape}; batch and head size must "
            "be the same."
        )
    if (work.seq_q, work.seq_k) != (q.shape[1], k.shape[1]):
        raise ValueError(
            f"work: made for {work.seq_q} queries and {work.seq_k} keys, but q and k "
            f"have {q.shape[1]} and {k.shape[1]}; call make_tile_work with these."
        )


def _check_heads(q: jax.Array, k: jax.Array, work: TileWork, *, is_part: bool) -> None:
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q and k: {q.shape[2]} heads of queries can't share {k.shape[2]} heads of "
            "keys; the former must be a multiple of the latter."
        )
    fits = is_part and work.num_heads % q.shape[2] == 0
    if work.num_heads not in (1, q.shape[2]) and not fits:
        raise ValueError(
            f"work: of a layout of {work.num_heads} heads, but q has {q.shape[2]}; "
            "make the layout for that many, or for one head that all share."
        )


def _limits(
    q: jax.Array,
    k: jax.Array,
    segment_ids: Segments | None,
    kv_seq_lens: jax.Array | None,
) -> Limits:
    is_pair = isinstance(segment_ids, tuple | list)
    pair = segment_ids if is_pair else (segment_ids,) * 2
    if is_pair and (len(pair) != 2 or any(x is None for x in pair)):
        raise ValueError(
            "segment_ids: must be one array, a pair of them (of queries and of keys), "
            "or None."
        )
    for name, x, of in (("queries", pair[0], q), ("keys", pair[1], k)):
        if x is not None and x.shape != of.shape[:2]:
            raise ValueError(
                f"segment_ids: has shape {x.shape} for {name} of shape {of.shape}; it "
                f"must be [batch, tokens], {of.shape[:2]}. Give a pair if queries "
                "and keys differ."
            )
    if kv_seq_lens is not None and kv_seq_lens.shape != k.shape[:1]:
        raise ValueError(
            f"kv_seq_lens: has shape {kv_seq_lens.shape}; give one length for each of "
            f"{k.shape[0]} sequences."
        )
    given = (*pair, kv_seq_lens)
    of_q, of_k, lens = (None if x is None else x.astype(jnp.int32) for x in given)
    return Limits(of_q, of_k, None if lens is None else jnp.minimum(lens, k.shape[1]))
