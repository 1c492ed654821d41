"""Models as their users wrote them: Flax alone, no annotation, no rule.

Each comes with its data, and with what a plain loop needs to call it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ROWS, CLASSES = 32, 4


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.Sequential(
            nnx.Linear(12, 64, rngs=rngs),
            nnx.gelu,
            nnx.LayerNorm(64, rngs=rngs),
            nnx.Linear(64, CLASSES, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers(x)


class Recurrent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.rnn = nnx.RNN(nnx.GRUCell(8, 32, rngs=rngs), rngs=rngs)
        self.out = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.rnn(x)[:, -1])


class Cnn(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 16, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.8, rngs=rngs)
        self.out = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x)))
        return self.out(x.mean((1, 2)))


class Tied(nnx.Module):
    """A vocabulary embedded and attended with one table; one kernel in two layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(32, 24, rngs=rngs)
        self.first = nnx.Linear(24, 24, rngs=rngs)
        self.second = nnx.Linear(24, 24, use_bias=False, rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens).mean(1)
        x = self.second(nnx.tanh(self.first(x)))
        return self.embed.attend(x)[:, :CLASSES]


class Scanned(nnx.Module):
    """Two stacks of layers: one by nnx.scan, one by jax.lax.scan over a raw Param."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(16, 16, rngs=rngs)

        self.stack = stack(rngs)
        self.raw = nnx.Param(0.2 * jax.random.normal(rngs.params(), (4, 16, 16)))
        self.out = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def apply(layer: nnx.Linear, x: jax.Array) -> jax.Array:
            return x + nnx.tanh(layer(x))

        x = apply(self.stack, x)
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, self.raw[...])
        return self.out(x)


class Nested(nnx.Module):
    """Groups of layers: a loop over each group's layers in a loop over groups."""

    def __init__(self, rngs: nnx.Rngs):
        draw = rngs.params.normal
        self.layers = nnx.Param(0.2 * draw((3, 2, 16, 16)))
        self.between = nnx.Param(0.2 * draw((3, 16, 16)))
        self.out = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ kernel), None

        def group(x: jax.Array, own: tuple) -> tuple[jax.Array, None]:
            kernels, between = own
            x, _ = jax.lax.scan(layer, x, kernels)
            return jnp.sin(x @ between) + x, None

        x, _ = jax.lax.scan(group, x, (self.layers[...], self.between[...]))
        return self.out(x)


class Listed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.data([nnx.Linear(24, 24, rngs=rngs) for _ in range(3)])
        self.out = nnx.Linear(24, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + nnx.silu(layer(x))
        return self.out(x)


class LinenEncoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        attention = nn.MultiHeadDotProductAttention(
            num_heads=4, dropout_rate=0.2, deterministic=not training
        )
        x = x + nn.Dropout(0.2, deterministic=not training)(
            attention(nn.LayerNorm()(x))
        )
        h = nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        x = x + nn.Dropout(0.2, deterministic=not training)(h)
        return nn.Dense(CLASSES)(x.mean(1))


class LinenCnn(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        for features in (16, 24):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            norm = nn.BatchNorm(use_running_average=not training, momentum=0.8)
            x = nn.relu(norm(x))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the shape of one example, and how it is trained.

    Attributes:
      model: what `jaxpar.initialize` is given.
      example: shape of an example's input; tokens if it is an int.
      mesh: (data, tensor).
      accumulate: micro-batches a step.
      num_params: leaves, counted by hand.
    """

    model: Any
    example: tuple[int, ...]
    mesh: tuple[int, int]
    accumulate: int
    num_params: int
    is_tokens: bool = False


CASES = {
    "mlp": Case(lambda rngs: Mlp(rngs), (12,), (8, 1), 2, 6),
    "gru": Case(lambda rngs: Recurrent(rngs), (5, 8), (4, 2), 1, 5),
    "cnn": Case(lambda rngs: Cnn(rngs), (6, 6, 3), (4, 2), 2, 5),
    "linen_encoder": Case(LinenEncoder(), (6, 32), (4, 2), 1, 18),
    "linen_cnn": Case(LinenCnn(), (5, 5, 3), (8, 1), 1, 8),
    "tied": Case(lambda rngs: Tied(rngs), (5,), (4, 2), 1, 3, is_tokens=True),
    "scanned": Case(lambda rngs: Scanned(rngs), (16,), (4, 2), 2, 5),
    "nested": Case(lambda rngs: Nested(rngs), (16,), (8, 1), 1, 4),
    "listed": Case(lambda rngs: Listed(rngs), (24,), (8, 1), 1, 8),
}


def loss_fn(model: Any, batch: dict) -> jax.Array:
    told = {"training": model.training} if hasattr(model, "training") else {}
    logits = model(batch["x"], **told)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def make_batches(name: str, num: int) -> list[dict[str, np.ndarray]]:
    """Batches whose rows differ in scale: every shard has its own statistics."""
    case, rng = CASES[name], np.random.default_rng(0)
    shape = (ROWS, *case.example)
    scale = np.linspace(0.2, 3.0, ROWS).reshape(-1, *(1 for _ in case.example))
    return [
        {
            "x": rng.integers(0, 32, shape, dtype=np.int32)
            if case.is_tokens
            else (scale * rng.normal(size=shape) + scale).astype(np.float32),
            "y": rng.integers(0, CLASSES, ROWS, dtype=np.int32),
        }
        for _ in range(num)
    ]


def make_plain_loss(name: str) -> Callable[..., tuple[jax.Array, Any]]:
    """``(params, model_state, batch) -> (loss, model_state)``, by Flax alone."""
    model = CASES[name].model
    return _plain_linen(model) if isinstance(model, nn.Module) else _plain_nnx(model)


def _plain_linen(module: nn.Module) -> Callable[..., tuple[jax.Array, Any]]:
    def loss(params: dict, state: dict, batch: dict) -> tuple[jax.Array, dict]:
        logits, state = module.apply(
            {"params": params, **state}, batch["x"], training=True, mutable=list(state)
        )
        return _cross_entropy(logits, batch["y"]), state

    return loss


def _plain_nnx(factory: Callable) -> Callable[..., tuple[jax.Array, Any]]:
    def loss(params: dict, state: dict, batch: dict) -> tuple[jax.Array, dict]:
        model = factory(nnx.Rngs(0))
        for kind, values in ((nnx.Param, params), (nnx.BatchStat, state)):
            own = nnx.state(model, kind)
            nnx.replace_by_pure_dict(own, values)
            nnx.update(model, own)
        value = _cross_entropy(model(batch["x"]), batch["y"])
        return value, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    return loss


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -chosen.mean()
