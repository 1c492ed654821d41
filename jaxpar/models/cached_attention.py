"""Attention that keeps its keys and values, for one token after the other."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.models.attend import attend, attention_implementation
from jaxpar.models.attention import Attention
from jaxpar.sparse_attention import SparsityPattern
from jaxpar.sparse_attention.layouts import make_layout


class KVCache(nnx.Variable):
    """Keys, or values, of the tokens before, [B, S, K, H]."""


class CachedAttention(Attention):
    """Attention whose queries see the keys of the calls before.

    Args:
      rows: B, of the batch.
      length: S, the most tokens of a row.
      *args: as `Attention` takes them.
      **how: likewise.
    """

    def __init__(self, rows: int, length: int, *args: Any, **how: Any):
        super().__init__(*args, **how)
        num_kv = self.key.kernel.shape[1] // self.head_size
        empty = jnp.zeros((rows, length, num_kv, self.head_size))
        self.keys, self.values = KVCache(empty), KVCache(empty)
        self.first = KVCache(jnp.zeros((), jnp.int32))

    def _attend(
        self,
        query_BTNH: Float[Array, "B T N H"],
        key_BSKH: Float[Array, "B T K H"],
        value_BSKH: Float[Array, "B T K H"],
        mask_BNTS: jax.Array | None,
        segment_ids_BT: Int[Array, "B T"] | None,
        bias_NTS: jax.Array | None,
    ) -> Float[Array, "B T N H"]:
        """Add the keys and values to those before, and attend to all of them."""
        del mask_BNTS, segment_ids_BT, bias_NTS  # A row is one segment here.
        first = self.first[...]
        for cache, own in ((self.keys, key_BSKH), (self.values, value_BSKH)):
            whole = cache[...]
            start = (0, first, 0, 0)
            cache[...] = jax.lax.dynamic_update_slice(whole, own, start)
        self.first[...] = first + query_BTNH.shape[1]
        places_T = first + jnp.arange(query_BTNH.shape[1])
        scoring, pattern = self.scoring.without_mask(), None
        if not isinstance(self.implementation, str):
            pattern = self._in_pattern(self.implementation, places_T)
        chosen = attention_implementation(
            "auto",
            dtype=query_BTNH.dtype,
            head_size=self.head_size,
            masked=True,
            scoring=scoring,
        )
        visible_TS = self._visible(places_T)
        shape = query_BTNH.shape[0], 1, *visible_TS.shape
        return attend(
            query_BTNH,
            self.keys[...].astype(query_BTNH.dtype),
            self.values[...].astype(query_BTNH.dtype),
            jnp.broadcast_to(visible_TS, shape),
            implementation=chosen,
            scoring=scoring,
            bias_NTS=pattern,
        )

    def _visible(self, places_T: jax.Array) -> jax.Array:
        """Which keys the tokens at some places see, [T, S]."""
        keys_S, own_T1 = jnp.arange(self.keys.shape[1]), places_T[:, None]
        visible_TS = keys_S <= own_T1
        if self.scoring.window is not None:
            visible_TS = visible_TS & (keys_S > own_T1 - self.scoring.window)
        return visible_TS

    def _in_pattern(self, pattern: SparsityPattern, places_T: jax.Array) -> jax.Array:
        """A bias that hides keys outside of a head's blocks, [N, T, S]."""
        length = max(self.keys.shape[1], self.pattern_len or 0)
        length = -(-length // pattern.block) * pattern.block
        blocks_NQK = jnp.asarray(make_layout(pattern, length).blocks)
        rows_NTK = blocks_NQK[:, places_T // pattern.block]
        rows_NTS = jnp.repeat(rows_NTK, pattern.block, axis=-1)
        return jnp.where(rows_NTS[..., : self.keys.shape[1]], 0.0, -1e9)
