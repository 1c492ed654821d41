"""Models whose parts have mutable state, in NNX and Linen, and a plain loop over them.

Every part's output depends on its state, and each call changes it: a backward pass that
sees another state than its forward has other gradients. The loop calls the modules one
after the other, by Flax alone, one micro-batch after another.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar

VOCAB, WIDE, NARROW, ROWS, LENGTH, ACCUMULATE, STEPS = 16, 8, 6, 16, 3, 4, 5
NORMAL = nnx.initializers.normal(0.4)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def size_of(kernel: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(jnp.sqrt(jnp.mean(kernel**2)))


class Scaled(nnx.Module):
    """A matrix divided by a moving average of its size, which starts far from it."""

    def __init__(self, rows: int, columns: int, rngs: nnx.Rngs, names: Any = None):
        init = nnx.with_partitioning(NORMAL, names) if names else NORMAL
        self.kernel = nnx.Param(init(rngs.params(), (rows, columns)))
        self.size = nnx.Variable(jnp.float32(2))
        self.calls = nnx.Variable(jnp.int32(0))

    def matrix(self):
        kernel, before = self.kernel[...], self.size[...]
        size = 0.9 * before + 0.1 * size_of(kernel)
        self.size.set_value(size)
        self.calls.set_value(self.calls[...] + 1)
        return kernel / size


class Embed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = Scaled(VOCAB, WIDE, rngs)

    def __call__(self, tokens):
        return self.table.matrix()[tokens]


class Block(nnx.Module):
    """Its first matrix is divided by its spectral norm, by one step of the power
    iteration a call."""

    def __init__(self, rngs: nnx.Rngs, width: int = WIDE):
        named = nnx.with_partitioning(NORMAL, ("embed", "mlp"))
        self.up = nnx.Linear(width, 12, kernel_init=named, rngs=rngs)
        self.down = Scaled(12, width, rngs)
        self.u = nnx.BatchStat(NORMAL(rngs.params(), (12,)))
        self.largest = nnx.BatchStat(jnp.zeros(()))
        self.gain = nnx.BatchStat(jnp.float32(1.5))

    def __call__(self, x):
        kernel = self.up.kernel[...]
        v = kernel @ self.u[...]
        v = v / jnp.linalg.norm(v)
        u = v @ kernel
        u = u / jnp.linalg.norm(u)
        self.u.set_value(jax.lax.stop_gradient(u))
        largest = jnp.abs(jax.lax.stop_gradient(kernel)).max()
        self.largest.set_value(jnp.maximum(self.largest[...], largest))
        norm = jax.lax.stop_gradient(v) @ kernel @ jax.lax.stop_gradient(u)
        # The gradient of this product needs the state itself, as it was.
        inner = jnp.tanh(x @ (kernel / norm) + self.up.bias[...]) * self.gain[...]
        self.gain.set_value(0.9 * self.gain[...] + 0.1 * size_of(kernel))
        return x + inner @ self.down.matrix()


class Projection(nnx.Module):
    """A head, or a part between two sections."""

    def __init__(self, rngs: nnx.Rngs, rows: int = WIDE, columns: int = VOCAB):
        self.out = Scaled(rows, columns, rngs)

    def __call__(self, x):
        return x @ self.out.matrix()


class LinenBlock(nn.Module):
    """Its first layer is flax's own `SpectralNorm`."""

    @nn.compact
    def __call__(self, x):
        updates = self.is_mutable_collection("batch_stats")
        calls = self.variable("counts", "calls", lambda: jnp.int32(0))
        if self.is_mutable_collection("counts") and not self.is_initializing():
            calls.value += 1
        layer = nn.Dense(12, kernel_init=NORMAL, name="up")
        up = nn.SpectralNorm(layer, name="norm")
        inner = jnp.tanh(up(x, update_stats=updates and not self.is_initializing()))
        return x + nn.Dense(x.shape[-1], kernel_init=NORMAL, name="down")(inner)


class LinenEmbed(nn.Module):
    """Divides by a moving average, as `Scaled` does."""

    @nn.compact
    def __call__(self, tokens):
        table = self.param("table", NORMAL, (VOCAB, WIDE))
        average = self.variable("averages", "size", lambda: jnp.float32(2))
        size = 0.9 * average.value + 0.1 * size_of(table)
        if self.is_mutable_collection("averages") and not self.is_initializing():
            average.value = size
        return (table / size)[tokens]


NARROWING = functools.partial(Projection, rows=WIDE, columns=NARROW)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model's parts, in order.

    Attributes:
      embed: as `jaxpar.PipelineModel` has it.
      sections: likewise, by name.
      head: likewise.
    """

    embed: Any
    sections: dict[str, Any]
    head: Any

    def model(self, **change: Any) -> jaxpar.PipelineModel:
        given = {"embed": self.embed, "sections": self.sections, "head": self.head}
        return jaxpar.PipelineModel(**given, allow_uneven=True, **change)

    @property
    def in_order(self) -> Sequence[tuple[str, Any, int | None]]:
        """Name, part, and the number of blocks; None for a part alone."""
        middle = [
            (name, *given) if isinstance(given, tuple) else (name, given, None)
            for name, given in self.sections.items()
        ]
        return [("embed", self.embed, None), *middle, ("head", self.head, None)]


MODELS = {
    "nnx": Parts(Embed, {"blocks": (Block, 4)}, Projection),
    "linen": Parts(LinenEmbed(), {"blocks": (LinenBlock(), 4)}, Projection),
    "sections": Parts(
        Embed,
        {
            "wide": (Block, 4),
            "narrowing": NARROWING,
            "narrow": (functools.partial(Block, width=NARROW), 3),
        },
        functools.partial(Projection, rows=NARROW),
    ),
}


def apply(part: Any, params: Any, state: Any, x: Any) -> tuple[Any, Any]:
    """Call a part's module; returns its output and its state after the call."""
    if isinstance(part, nn.Module):
        return part.apply({"params": params, **state}, x, mutable=list(state))
    with nnx.use_eager_sharding(False):
        made = nnx.eval_shape(lambda: part(rngs=nnx.Rngs(0)))
        graphdef, own, rest = nnx.split(made, nnx.Param, ...)
        nnx.replace_by_pure_dict(own, params)
        nnx.replace_by_pure_dict(rest, state)
        module = nnx.merge(graphdef, own, rest)
        out = module(x)
        return out, nnx.to_pure_dict(nnx.split(module, nnx.Param, ...)[2])


def plain_loss(
    parts: Parts, params: dict, state: dict, batch: dict
) -> tuple[jax.Array, dict]:
    """The loss of a micro-batch, and the state after it."""
    x, after = batch["tokens"], {}
    for name, part, count in parts.in_order:
        own = params[name], state[name]
        if count is None:
            x, after[name] = apply(part, *own, x)
            continue
        made = []
        for layer in range(count):
            x, new = apply(part, *jax.tree.map(lambda leaf, i=layer: leaf[i], own), x)
            made.append(new)
        after[name] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)
    return cross_entropy(x, batch), after


def cross_entropy(logits: jax.Array, batch: dict) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
    return losses.mean()


def loss_fn(model: Callable, batch: dict) -> jax.Array:
    return cross_entropy(model(batch["tokens"]), batch)


def make_batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            name: rng.integers(0, VOCAB, (ROWS, LENGTH), np.int32)
            for name in ("tokens", "next")
        }
        for _ in range(STEPS)
    ]


BATCHES = make_batches()


def make_engine(name: str, mesh: jaxpar.MeshShape, **change: Any) -> jaxpar.Engine:
    """The model's engine; what is of `PipelineModel` among the changes goes to it."""
    own = {key: change.pop(key) for key in ("remat", "unroll") if key in change}
    right = {
        "model": MODELS[name].model(**own),
        "loss_fn": loss_fn,
        "optimizer": OPTIMIZER,
        "sample_batch": BATCHES[0],
        "mesh": mesh,
        "accumulate": ACCUMULATE,
    }
    return jaxpar.initialize(**(right | change))


@functools.cache
def start(name: str) -> tuple[dict, dict]:
    """Parameters and state before training, of seed 0."""
    state = make_engine(name, jaxpar.MeshShape(data=1)).state
    return jax.device_get((state.params, state.model_state))


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a plain loop leaves: losses, parameters, state, and an evaluation's loss."""

    losses: list[float]
    params: dict
    state: dict
    evaluated: float


@functools.cache
def trained_plainly(name: str) -> Trained:
    params, state = start(name)
    opt_state, losses = OPTIMIZER.init(params), []
    loss_of = functools.partial(plain_loss, MODELS[name])
    value_and_grad = jax.jit(jax.value_and_grad(loss_of, has_aux=True))

    @jax.jit
    def update(params: dict, opt_state: Any, grads: list[dict]) -> tuple:
        mean = jax.tree.map(lambda *each: sum(each) / ACCUMULATE, *grads)
        updates, opt_state = OPTIMIZER.update(mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in BATCHES:
        made, grads = [], []
        for index in range(ACCUMULATE):
            rows = {key: x[index::ACCUMULATE] for key, x in batch.items()}
            (loss, state), own = value_and_grad(params, state, rows)
            made, grads = [*made, float(loss)], [*grads, own]
        params, opt_state = update(params, opt_state, grads)
        losses.append(sum(made) / ACCUMULATE)
    evaluated = float(jax.jit(loss_of)(params, state, BATCHES[0])[0])
    return Trained(losses, *jax.device_get((params, state)), evaluated)
