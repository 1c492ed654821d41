"""Qwen 3's shape (0.6B) as users write their models: flax's own layers, one by one.

Nothing of jaxpar's models is in it: benchmarks/compiled_gpu.py reads what its compiled
step pays. Source of the shape: Yang et al., "Qwen3 Technical Report" (2025), table 1.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def attend_causally(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend to the tokens before, by the program that JAX chooses."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """A decoder with grouped queries, and norms of queries and keys."""

    vocab_size: int = 151_936
    layers: int = 28
    width: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head: int = 128
    hidden: int = 3072
    base: float = 1e6
    dtype: Any = None
    """Of the embedding; flax's default is fp32, and all that follows is promoted."""
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = attend_causally
    """Maps queries, keys and values, [B, T, N, H], to weighted sums of values."""


def rotated(x_BTNH: jax.Array, base: float) -> jax.Array:
    """Rotate the halves of each head by position, in fp32."""
    tokens, half = x_BTNH.shape[1], x_BTNH.shape[-1] // 2
    angles = jnp.arange(tokens)[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    one, two = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    both = [one * cos - two * sin, two * cos + one * sin]
    return jnp.concatenate(both, axis=-1).astype(x_BTNH.dtype)


class Layer(nnx.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs):
        c = self.config = config

        def linear(ins: int, outs: int) -> nnx.Linear:
            return nnx.Linear(ins, outs, use_bias=False, rngs=rngs)

        self.norm, self.mlp_norm = (nnx.RMSNorm(c.width, rngs=rngs) for _ in range(2))
        self.q_norm, self.k_norm = (nnx.RMSNorm(c.head, rngs=rngs) for _ in range(2))
        self.q = linear(c.width, c.heads * c.head)
        self.k = linear(c.width, c.kv_heads * c.head)
        self.v = linear(c.width, c.kv_heads * c.head)
        self.out = linear(c.heads * c.head, c.width)
        self.gate, self.up = (linear(c.width, c.hidden) for _ in range(2))
        self.down = linear(c.hidden, c.width)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Add what the layer finds to the residual stream."""
        normed, c = self.norm(x_BTD), self.config
        rows = (*x_BTD.shape[:2], -1, c.head)
        q = rotated(self.q_norm(self.q(normed).reshape(rows)), c.base)
        k = rotated(self.k_norm(self.k(normed).reshape(rows)), c.base)
        v = self.v(normed).reshape(rows)
        seen = c.attend(q, k, v)
        x_BTD = x_BTD + self.out(seen.reshape(*x_BTD.shape[:2], -1))
        normed = self.mlp_norm(x_BTD)
        return x_BTD + self.down(jax.nn.silu(self.gate(normed)) * self.up(normed))


class Qwen3(nnx.Module):
    """Tokens [B, T] to logits [B, T, V]; the head is the embedding table."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs):
        c = config
        self.embed = nnx.Embed(c.vocab_size, c.width, dtype=c.dtype, rngs=rngs)
        self.layers = nnx.List([Layer(c, rngs=rngs) for _ in range(c.layers)])
        self.norm = nnx.RMSNorm(c.width, rngs=rngs)

    def hidden(self, tokens_BT: jax.Array) -> jax.Array:
        """The activations that the head reads, [B, T, D]."""
        x_BTD = self.embed(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.norm(x_BTD)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Predict each next token."""
        return self.embed.attend(self.hidden(tokens_BT))
