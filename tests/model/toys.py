"""A small language model in parts, in NNX and in Linen, and in plain JAX.

Both libraries name the parameters alike, so that one plain function says what any mix
of parts computes. It shares nothing with jaxpar.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxpar

VOCAB, WIDTH, HIDDEN, LAYERS, ROWS, LENGTH = 16, 8, 12, 3, 8, 5
NORMAL = nnx.initializers.normal(0.4)
TIE = (("embed", "table"), ("head", "table"))


class Embed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        table = NORMAL(rngs.params(), (VOCAB, WIDTH))
        self.table = nnx.Param(table, out_sharding=("vocab", "embed"))

    def __call__(self, tokens, *, positions=None):
        x = self.table[...][tokens]
        return x if positions is None else x + jnp.sin(positions)[..., None]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, init: Any = NORMAL, act: Callable = jnp.tanh):
        named = nnx.with_partitioning(init, ("embed", "mlp"))
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=named, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, kernel_init=init, rngs=rngs)
        self.act = act

    def __call__(self, x, *, positions=None):
        if positions is not None:
            x = x + jnp.cos(positions)[..., None]
        hidden = checkpoint_name(self.act(self.up(x)), "hidden")
        return x + self.down(hidden)


class RecurrentBlock(nnx.Module):
    """Runs step by step over the sequence: gradients of weights are made in a loop."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, kernel_init=NORMAL, rngs=rngs)

    def __call__(self, x):
        kernel, bias = self.inner.kernel[...], self.inner.bias[...]

        def step(state, x):
            state = jnp.tanh(x + state @ kernel + bias)
            return state, state

        by_step = x.swapaxes(0, 1)
        _, out = jax.lax.scan(step, jnp.zeros_like(by_step[0]), by_step)
        return x + out.swapaxes(0, 1)


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(NORMAL(rngs.params(), (VOCAB, WIDTH)))

    def __call__(self, x, *, temperature=None):
        logits = x @ self.table[...].T
        return logits if temperature is None else logits / temperature


class LinenEmbed(nn.Module):
    @nn.compact
    def __call__(self, tokens, *, positions=None):
        init = nn.with_partitioning(NORMAL, ("vocab", "embed"))
        table: Any = self.param("table", init, (VOCAB, WIDTH))
        x = table[tokens]
        return x if positions is None else x + jnp.sin(positions)[..., None]


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, *, positions=None):
        if positions is not None:
            x = x + jnp.cos(positions)[..., None]
        named = nn.with_partitioning(NORMAL, ("embed", "mlp"))
        hidden = jnp.tanh(nn.Dense(HIDDEN, kernel_init=named, name="up")(x))
        return x + nn.Dense(WIDTH, kernel_init=NORMAL, name="down")(hidden)


class LinenHead(nn.Module):
    @nn.compact
    def __call__(self, x, *, temperature=None):
        logits = x @ self.param("table", NORMAL, (VOCAB, WIDTH)).T
        return logits if temperature is None else logits / temperature


NNX = {"embed": Embed, "block": Block, "head": Head}
LINEN = {"embed": LinenEmbed(), "block": LinenBlock(), "head": LinenHead()}


def make_model(parts: dict[str, Any] = NNX, **change: Any) -> jaxpar.PipelineModel:
    """A model of one section, of the parts' block."""
    given = {"num_blocks": LAYERS, "allow_uneven": True, **parts, **change}
    section = (given.pop("block"), given.pop("num_blocks"))
    return jaxpar.PipelineModel(sections=[section], **given)


@jax.jit
def plain_logits(params: dict, tokens, positions=None, temperature=1.0) -> jax.Array:
    """The same model, layer after layer."""
    embed, blocks, head = params["embed"], params["blocks"], params["head"]
    x = embed["table"][tokens]
    if positions is not None:
        x = x + jnp.sin(positions)[..., None]
    for layer in range(len(blocks["up"]["bias"])):
        up, down = (
            {name: leaf[layer] for name, leaf in blocks[part].items()}
            for part in ("up", "down")
        )
        if positions is not None:
            x = x + jnp.cos(positions)[..., None]
        hidden = jnp.tanh(x @ up["kernel"] + up["bias"])
        x = x + hidden @ down["kernel"] + down["bias"]
    return x @ head.get("table", embed["table"]).T / temperature


@jax.jit
def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def loss_fn(model: Callable, batch: dict) -> jax.Array:
    return cross_entropy(model(batch["tokens"]), batch["targets"])


@jax.jit
def plain_loss(params: dict, batch: dict) -> jax.Array:
    return cross_entropy(plain_logits(params, batch["tokens"]), batch["targets"])


def make_batches(num: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (num, ROWS, LENGTH)
    tokens, targets = (rng.integers(0, VOCAB, shape, dtype=np.int32) for _ in range(2))
    return [{"tokens": tokens[i], "targets": targets[i]} for i in range(num)]


BATCHES = make_batches(3)


def make_mesh(**sizes: int) -> jax.sharding.Mesh:
    """Of as many devices as it takes."""
    shape = jaxpar.MeshShape(**({"data": 1} | sizes))
    num = shape.data * shape.pipe * shape.tensor
    return jaxpar.make_mesh(shape, jax.devices()[:num])


def make_engine(model: Any, **change: Any) -> jaxpar.Engine:
    right = {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": optax.adam(1e-2),
        "sample_batch": BATCHES[0],
        "mesh": make_mesh(),
    }
    return jaxpar.initialize(**(right | change))


def params_of(engine: jaxpar.Engine) -> dict:
    return jax.device_get(engine.state.params)
