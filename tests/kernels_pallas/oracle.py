"""Attention as its definition has it: every score, then a mask."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.block_sparse_attention import BlockLayout


def visible_mask(
    layout: BlockLayout, seq_q: int, seq_k: int, *, causal: bool
) -> np.ndarray:
    """Of each query and key, whether it sees it: [N, T, S]."""
    ones = np.ones((1, layout.block, layout.block), bool)
    seen = np.kron(layout.blocks, ones)[:, :seq_q, :seq_k]
    return seen & np.tri(seq_q, seq_k, dtype=bool) if causal else seen


def dense_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask_BNTS: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The result, 0 where nothing is seen, and the logarithm of each softmax's sum."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    precision = jax.lax.Precision.HIGHEST
    scores = scale * jnp.einsum("btnh,bsnh->bnts", q, k, precision=precision)
    scores = jnp.where(mask_BNTS, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    finite = jnp.where(jnp.isfinite(lse), lse, 0.0)
    weights = jnp.where(mask_BNTS, jnp.exp(scores - finite[..., None]), 0.0)
    return jnp.einsum("bnts,bsnh->btnh", weights, v, precision=precision), lse
