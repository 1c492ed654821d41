"""A small model whose middle blocks see some tokens, and its definition in plain JAX.

A block mixes each token with those before it, by their number and their position, so
that order, causality and positions all matter.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.models import RandomLTD

ROWS, TOKENS, WIDTH, BLOCKS, STEPS = 16, 12, 8, 4, 5
DROP = RandomLTD(first=1, last=-2, start=4, steps=3, multiple=4)
KEPT = 4, 4, 8, 12, 12
"""Tokens that blocks 1 and 2 see, by step."""
OPTIMIZER = optax.adamw(1e-2, eps=1e-6)
NORMAL = nnx.initializers.normal(0.3)


class Embed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(NORMAL(rngs.params(), (4, WIDTH)))

    def __call__(self, x_BTF: jax.Array) -> jax.Array:
        return x_BTF @ self.kernel[...]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.0):
        self.up = nnx.Param(
            NORMAL(rngs.params(), (WIDTH, 16)), out_sharding=("embed", "mlp")
        )
        self.down = nnx.Param(
            NORMAL(rngs.params(), (16, WIDTH)), out_sharding=("mlp", "embed")
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, *, positions_BT: jax.Array | None = None
    ) -> jax.Array:
        if positions_BT is None:
            positions_BT = jnp.arange(x_BTD.shape[1])[None]
        made = block_of(self.up[...], self.down[...], x_BTD, positions_BT)
        return x_BTD + self.dropout(made)


def block_of(
    up: jax.Array, down: jax.Array, x_BTD: jax.Array, positions_BT: jax.Array
) -> jax.Array:
    count = jnp.arange(1, x_BTD.shape[1] + 1)[:, None]
    mean_BTD = jnp.cumsum(x_BTD, axis=1) / count
    turned_BTD = mean_BTD * jnp.cos(0.3 * positions_BT[..., None]) + x_BTD
    return jnp.tanh(turned_BTD @ up) @ down


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(NORMAL(rngs.params(), (WIDTH, 2)))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD @ self.kernel[...]


def loss_fn(model: Any, batch: dict) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@functools.cache
def batches() -> tuple[dict[str, np.ndarray], ...]:
    rng = np.random.default_rng(0)

    def rows(width: int) -> np.ndarray:
        return rng.normal(size=(ROWS, TOKENS, width)).astype(np.float32)

    return tuple({"x": rows(4), "y": rows(2)} for _ in range(STEPS))


def make_engine(
    sizes: dict[str, int], *, dropout: float = 0.0, remat: str = "full", **given: Any
) -> jaxpar.Engine:
    shape = jaxpar.MeshShape(**{"data": 1, **sizes})
    return jaxpar.initialize(
        **{
            "model": jaxpar.PipelineModel(
                embed=Embed,
                sections=[(functools.partial(Block, dropout=dropout), BLOCKS)],
                head=Head,
                token_drop=DROP,
                remat=remat,
            ),
            "loss_fn": loss_fn,
            "optimizer": OPTIMIZER,
            "sample_batch": batches()[0],
            "mesh": jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
            "rules": {"mlp": "tensor"},
            **given,
        }
    )


@functools.cache
def trained_plainly(accumulate: int) -> tuple[list[float], Any]:
    """The losses by the definition, and the parameters after the steps."""
    engine = make_engine({})
    params, key = jax.device_get(engine.state.params), engine.state.key

    def block(params: Any, number: int, x_BTD: jax.Array, kept: jax.Array) -> Any:
        up, down = (params["blocks"][name][number] for name in ("up", "down"))
        seen_BKD = x_BTD[:, kept]
        return x_BTD.at[:, kept].add(block_of(up, down, seen_BKD, kept[None]))

    def loss_of(params: Any, batch: dict, key: jax.Array, kept: int) -> jax.Array:
        x_BTD = batch["x"] @ params["embed"]["kernel"]
        for number in range(BLOCKS):
            own = jax.random.fold_in(jax.random.fold_in(key, number), 0x170D)
            order = jnp.argsort(jax.random.bits(own, (TOKENS,)))
            places = jnp.sort(order[:kept]) if 0 < number < 3 else jnp.arange(TOKENS)
            x_BTD = block(params, number, x_BTD, places)
        return jnp.mean((x_BTD @ params["head"]["kernel"] - batch["y"]) ** 2)

    compute = jax.jit(jax.value_and_grad(loss_of), static_argnums=3)
    state, losses = OPTIMIZER.init(params), []
    for step, batch in enumerate(batches()):
        own, parts = jax.random.fold_in(key, step), []
        for part in range(accumulate):
            rows = {name: leaf[part::accumulate] for name, leaf in batch.items()}
            of_part = jax.random.fold_in(own, part)
            parts.append(compute(params, rows, of_part, KEPT[step]))
        loss, grads = jax.tree.map(lambda *x: sum(x) / accumulate, *parts)
        updates, state = OPTIMIZER.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, jax.device_get(params)
