"""A model with adapters beside frozen kernels in bf16 and int8, and its plain loop.

In embedding, blocks, a part between and the head; of one or two sections, tied or not.
The plain loop, in plain JAX on one device, differentiates the trained leaves alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar

VOCAB, WIDTH, HIDDEN, RANK, BLOCKS, ROWS, LENGTH = 24, 12, 20, 2, 8, 16, 5
NORMAL = nnx.initializers.normal(0.2)
LEVELS = 0.002
"""The size of an int8 kernel's steps, relative to its scale."""


class Embed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        table = NORMAL(rngs.params(), (VOCAB, WIDTH)).astype(jnp.bfloat16)
        self.table = nnx.Param(table, out_sharding=("vocab", "embed"))
        self.lora = nnx.Param(NORMAL(rngs.params(), (RANK, WIDTH)))

    def __call__(self, tokens):
        x = self.table[...].astype(jnp.float32)[tokens]
        return x + x[..., :RANK] @ self.lora[...]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        def levels(*shape: int) -> jax.Array:
            return jax.random.randint(rngs.params(), shape, -100, 101, jnp.int8)

        def normal(*shape: int) -> jax.Array:
            return NORMAL(rngs.params(), shape)

        named = {"out_sharding": ("embed", "mlp")}
        self.up = nnx.Param(normal(WIDTH, HIDDEN).astype(jnp.bfloat16), **named)
        self.lora_a = nnx.LoRAParam(normal(WIDTH, RANK))
        self.lora_b = nnx.LoRAParam(normal(RANK, HIDDEN), out_sharding=(None, "mlp"))
        self.bias = nnx.Param(normal(HIDDEN))
        self.down = nnx.Param(levels(HIDDEN, WIDTH), out_sharding=("mlp", "embed"))
        self.scale = nnx.Param(1 + normal(WIDTH))

    def __call__(self, x):
        own = {name: getattr(self, name)[...] for name in BLOCK}
        return run_block(own, x)


BLOCK = ("up", "lora_a", "lora_b", "bias", "down", "scale")


class Between(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(NORMAL(rngs.params(), (WIDTH, WIDTH)))
        self.lora = nnx.Param(NORMAL(rngs.params(), (WIDTH,)))

    def __call__(self, x):
        return run_between({"kernel": self.kernel[...], "lora": self.lora[...]}, x)


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        table = NORMAL(rngs.params(), (VOCAB, WIDTH)).astype(jnp.bfloat16)
        self.table = nnx.Param(table, out_sharding=("vocab", "embed"))
        self.lora = nnx.Param(1 + NORMAL(rngs.params(), (WIDTH,)))

    def __call__(self, x):
        return (x * self.lora[...]) @ self.table[...].astype(jnp.float32).T


def run_block(own: dict, x: jax.Array) -> jax.Array:
    inner = x @ own["up"].astype(jnp.float32) + own["bias"]
    inner = jnp.tanh(inner + x @ own["lora_a"] @ own["lora_b"])
    return x + inner @ (LEVELS * own["down"].astype(jnp.float32) * own["scale"])


def run_between(own: dict, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ own["kernel"]) * (1 + own["lora"])


def cross_entropy(logits: jax.Array, batch: dict) -> jax.Array:
    given = logits, batch["next"]
    return optax.softmax_cross_entropy_with_integer_labels(*given).mean()


def loss_fn(model: Callable, batch: dict) -> jax.Array:
    return cross_entropy(model(batch["tokens"]), batch)


def plain_loss(params: dict, batch: dict) -> jax.Array:
    """Of a model of one or two sections, tied or not."""
    embed, head = params["embed"], params["head"]
    x = embed["table"].astype(jnp.float32)[batch["tokens"]]
    x = x + x[..., :RANK] @ embed["lora"]
    for section in ("blocks", "between", "more"):
        if section == "between" and section in params:
            x = run_between(params[section], x)
        elif section in params:
            for layer in range(len(params[section]["scale"])):
                x = run_block({k: v[layer] for k, v in params[section].items()}, x)
    table = head.get("table", embed["table"]).astype(jnp.float32)
    return cross_entropy((x * head["lora"]) @ table.T, batch)


MODELS: dict[str, dict[str, Any]] = {
    "plain": {"sections": {"blocks": (Block, BLOCKS)}},
    "tied": {
        "sections": {"blocks": (Block, BLOCKS)},
        "tied": (("embed", "table"), ("head", "table")),
    },
    "sections": {
        "sections": {"blocks": (Block, 4), "between": Between, "more": (Block, 5)},
        "allow_uneven": True,
    },
}
TRAINED: dict[str, Any] = {
    "adapters": ["*/lora*"],
    "mixed": ["*/lora_*", "*/bias", "head/*"],  # Of the embedding nothing.
    "embedding": ["embed/*", "blocks/bias"],  # Of the head nothing, unless tied.
    "ends": ["embed/lora", "head/table"],  # Of the blocks nothing.
    "table": ["embed/table", "*/lora_b"],
    "scales": ["*/scale", "head/lora"],
    "typed": nnx.LoRAParam,
    "joint": ["*/scale", "between/kernel"],
}


def make_model(name: str, **change: Any) -> jaxpar.PipelineModel:
    given = {"embed": Embed, "head": Head} | MODELS[name]
    return jaxpar.PipelineModel(**(given | change))


def make_batches(num: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    names = ("tokens", "next")
    return [
        {name: rng.integers(0, VOCAB, (ROWS, LENGTH), np.int32) for name in names}
        for _ in range(num)
    ]


BATCHES = make_batches(3)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
Mesh = jaxpar.MeshShape


def make_engine(
    name: str, trained: str, mesh: Mesh, remat: str = "full", **change: Any
) -> jaxpar.Engine:
    right = {
        "model": make_model(name, remat=remat),
        "loss_fn": loss_fn,
        "optimizer": OPTIMIZER,
        "sample_batch": BATCHES[0],
        "mesh": mesh,
        "accumulate": 4,
        "trainable": TRAINED[trained],
    }
    return jaxpar.initialize(**(right | change))


@functools.cache
def start(name: str) -> dict[str, jax.Array]:
    """Leaf name -> value, in the model's dtypes."""
    params = make_model(name).init(0, BATCHES[0]["tokens"]).params
    return jaxpar.tree.named_leaves(jax.device_get(params))


def nested(leaves: dict[str, Any]) -> dict:
    made: dict = {}
    for name, leaf in leaves.items():
        made = jaxpar.tree.with_leaf(made, name.split("/"), jnp.asarray(leaf))
    return made


@functools.cache
def trained_plainly(name: str, trained: tuple[str, ...]) -> tuple[list[float], dict]:
    """Losses and the trained leaves of the plain loop."""
    leaves = {own: jnp.asarray(leaf) for own, leaf in start(name).items()}
    params = {own: leaves.pop(own).astype(jnp.float32) for own in trained}
    opt_state, losses = OPTIMIZER.init(params), []

    def loss_of(params: dict, batch: dict) -> jax.Array:
        return plain_loss(nested(leaves | params), batch)

    @jax.jit
    def step(params: dict, opt_state: Any, batch: dict) -> tuple:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for batch in BATCHES:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, jax.device_get(params)
