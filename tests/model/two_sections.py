"""A model of two sections and a part between them, after which blocks are narrower.

In NNX, and as plain functions of the same parameters, which share nothing with jaxpar.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxpar
from tests.model.toys import (
    BATCHES,
    NORMAL,
    VOCAB,
    WIDTH,
    Embed,
    cross_entropy,
    loss_fn,
)

NARROW = 6
COUNTS = {"wide": 4, "narrow": 3}


class Adding(nnx.Module):
    """A block of any width."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.inner = nnx.Linear(width, width, kernel_init=NORMAL, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.inner(x))


class Projecting(nnx.Module):
    """A part between, or a head."""

    def __init__(self, width: int, out: int, rngs: nnx.Rngs):
        self.out = nnx.Linear(width, out, kernel_init=NORMAL, rngs=rngs)

    def __call__(self, x):
        return self.out(x)


PARTS = {
    "wide": functools.partial(Adding, WIDTH),
    "narrowing": functools.partial(Projecting, WIDTH, NARROW),
    "narrow": functools.partial(Adding, NARROW),
}
HEADS = {
    width: functools.partial(Projecting, width, VOCAB) for width in (WIDTH, NARROW)
}


def make_model(
    parts: Mapping[str, Any] = PARTS,
    counts: Mapping[str, int] = COUNTS,
    **change: Any,
) -> jaxpar.PipelineModel:
    """The model, or one of other parts."""
    sections = {
        name: (part, counts[name]) if name in counts else part
        for name, part in parts.items()
    }
    right = {"embed": Embed, "sections": sections, "head": HEADS[NARROW]}
    return jaxpar.PipelineModel(**{**right, **change})


def make_network(*args: Any, **change: Any) -> Any:
    return make_model(*args, **change).make_network(loss_fn, BATCHES[0])


def make_params() -> dict[str, Any]:
    """Parameters in NumPy; no bias is zero."""
    rng = np.random.default_rng(1)

    def linear(*shape: int) -> dict[str, np.ndarray]:
        shapes = {"kernel": shape, "bias": (*shape[:-2], shape[-1])}
        return {
            name: 0.4 * rng.standard_normal(own, np.float32)
            for name, own in shapes.items()
        }

    table = 0.4 * rng.standard_normal((VOCAB, WIDTH), np.float32)
    return {
        "embed": {"table": table},
        "wide": {"inner": linear(COUNTS["wide"], WIDTH, WIDTH)},
        "narrowing": {"out": linear(WIDTH, NARROW)},
        "narrow": {"inner": linear(COUNTS["narrow"], NARROW, NARROW)},
        "head": {"out": linear(NARROW, VOCAB)},
    }


def linear(own: Any, x: Any) -> jax.Array:
    return x @ own["kernel"] + own["bias"]


def plain_blocks(blocks: Any, x: Any, count: int) -> jax.Array:
    """The first `count` of stacked blocks, one after the other."""
    for layer in range(count):
        own = jax.tree.map(lambda leaf, i=layer: leaf[i], blocks["inner"])
        x = x + jnp.tanh(linear(own, x))
    return x


@jax.jit
def plain_logits(params: Any, tokens: Any) -> jax.Array:
    x = params["embed"]["table"][tokens]
    x = plain_blocks(params["wide"], x, COUNTS["wide"])
    x = linear(params["narrowing"]["out"], x)
    x = plain_blocks(params["narrow"], x, COUNTS["narrow"])
    return linear(params["head"]["out"], x)


@jax.jit
def plain_loss(params: Any, batch: Any) -> jax.Array:
    return cross_entropy(plain_logits(params, batch["tokens"]), batch["targets"])
