"""Small models and losses, each with the plain loop that says what is right.

The oracle shares nothing with the engine but the model's own code: one device, the
whole batch at once, `jax.value_and_grad`, optax.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.model.network import WholeModel
from jaxpar.models import make_decoder
from jaxpar.models.decoder.config import DecoderConfig

ROWS, LENGTH, VOCAB, CLIP = 32, 16, 64, 0.5
GPT_CONFIG = DecoderConfig(
    vocab_size=VOCAB, seq_len=LENGTH, num_layers=2, num_heads=8, width=32
)


class LinenNet(nn.Module):
    """Embedding, a column- and a row-parallel product, and a head."""

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        named = nn.with_logical_partitioning
        normal = nn.initializers.normal(0.2)
        x = nn.Embed(VOCAB, 32, embedding_init=named(normal, ("vocab", "embed")))(
            tokens_BT
        )
        h = nn.Dense(
            64,
            kernel_init=named(normal, ("embed", "mlp")),
            bias_init=named(nn.initializers.zeros, ("mlp",)),
        )(x)
        x = x + nn.Dense(32, kernel_init=named(normal, ("mlp", "embed")))(nn.gelu(h))
        return nn.Dense(VOCAB, use_bias=False)(nn.LayerNorm()(x))


def most_slow(cases: list[tuple]) -> list[Any]:
    """Two of three with make test-slow: compiling takes most of the time."""
    return [
        pytest.param(case, marks=pytest.mark.slow) if number % 3 else case
        for number, case in enumerate(cases)
    ]


def losses_of(model: Callable, batch: dict) -> jax.Array:
    """Next-token cross entropy, [B, T]."""
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def plain_loss(model: Callable, batch: dict) -> jax.Array:
    return losses_of(model, batch).mean()


def weighted_loss(model: Callable, batch: dict) -> jaxpar.Weighted:
    losses = losses_of(model, batch)
    return jaxpar.Weighted((losses * batch["mask"]).sum(), batch["mask"].sum())


LOSSES = {"plain": plain_loss, "weighted": weighted_loss}


def make_model(library: str) -> Any:
    if library == "linen":
        return LinenNet()
    return make_decoder(GPT_CONFIG)


def call_plainly(library: str, params: dict, tokens: jax.Array) -> jax.Array:
    """Logits of the model with these parameters, by Flax alone."""
    if library == "linen":
        return LinenNet().apply({"params": params}, tokens)
    return _whole_gpt().with_params(params)(tokens)


@functools.cache
def _whole_gpt() -> WholeModel:
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    with jax.ensure_compile_time_eval():  # First called in a traced function.
        return make_decoder(GPT_CONFIG).init(0, tokens)


def make_batches(num: int) -> list[dict[str, np.ndarray]]:
    """Batches whose masks weigh differently on every row, shard and micro-batch."""
    rng = np.random.default_rng(0)
    kept = np.linspace(0.95, 0.1, ROWS)[:, None]
    return [
        {
            "tokens": rng.integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32),
            "mask": (rng.random((ROWS, LENGTH)) < kept).astype(np.float32),
        }
        for _ in range(num)
    ]


def recording(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keep the (clipped) gradients of the last step beside `inner`'s state."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = inner.update(grads, state[1], params)
        return updates, (grads, new)

    return optax.GradientTransformation(
        lambda params: (jax.tree.map(jnp.zeros_like, params), inner.init(params)),
        update,
    )


@dataclasses.dataclass
class Oracle:
    """The plain loop: losses, the first step's clipped gradients, final parameters."""

    losses: list[float]
    grads: dict
    norm: float
    params: dict


def run_plainly(
    library: str,
    loss: str,
    params: dict,
    optimizer: optax.GradientTransformation,
    batches: list[dict],
) -> Oracle:
    def loss_of(params: dict, batch: dict) -> jax.Array:
        out = LOSSES[loss](lambda x: call_plainly(library, params, x), batch)
        return out.total / out.weight if loss == "weighted" else out

    @jax.jit
    def step(params: dict, opt_state: Any, batch: dict) -> tuple:
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / norm), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, grads, norm

    opt_state, losses, first = optimizer.init(params), [], None
    for batch in batches:
        params, opt_state, value, grads, norm = step(params, opt_state, batch)
        losses.append(float(value))
        first = first or (jax.device_get(grads), float(norm))
    return Oracle(losses, *first, jax.device_get(params))


def distance(tree: Any, other: Any) -> float:
    """The largest ||difference|| / ||leaf|| over the leaves."""
    tree, other = jax.device_get((tree, other))
    return max(
        float(np.linalg.norm(a - b) / np.linalg.norm(b))
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    )
