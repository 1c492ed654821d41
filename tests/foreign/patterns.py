"""What people's Flax models do, a small model each, and how plain Flax trains it.

Nothing here imports jaxpar. A case has the loss that the engine is given. An NNX model
trains plainly by the same loss; a Linen model brings a loss on ``module.apply``.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen import spmd

ROWS, WIDTH = 16, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A pattern.

    Attributes:
      model: what `jaxpar.initialize` is given.
      loss_fn: likewise.
      plain: of an NNX case the factory that plain Flax trains, of a Linen case
        ``(variables, batch) -> (loss, state)``; None for `model`.
      coupled: whether the loss has to be given whole micro-batches.
      axis_rules: Flax's, in whose context `jaxpar.initialize` is called.
    """

    model: Any
    loss_fn: Callable[..., jax.Array]
    plain: Callable[..., Any] | None = None
    coupled: bool = False
    axis_rules: tuple = ()


def make_batches(steps: int) -> list[dict[str, np.ndarray]]:
    """Rows that differ in scale: every shard has its own statistics."""
    rng = np.random.default_rng(0)
    scale = np.linspace(0.2, 2.0, ROWS, dtype=np.float32)[:, None]
    return [
        {
            "x": scale * rng.normal(size=(ROWS, WIDTH)).astype(np.float32) + scale,
            "y": rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
        }
        for _ in range(steps)
    ]


def squares(out: jax.Array, batch: dict) -> jax.Array:
    return jnp.mean((out - batch["y"]) ** 2)


def call(model: Any, batch: dict) -> jax.Array:
    return squares(model(batch["x"]), batch)


class Arrays(nnx.Module):
    """Arrays as attributes and in containers."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.scale = jnp.linspace(0.5, 1.5, WIDTH)
        self.shift = np.ones(WIDTH)
        self.nested = nnx.data({"a": jnp.full(WIDTH, 0.5)})
        self.listed = nnx.List([jnp.full(WIDTH, 2.0), nnx.Variable(0.5)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.up(x) * self.scale + self.shift
        return x * self.nested["a"] * self.listed[0] + self.listed[1]


class Counting(Arrays):
    """One of the arrays changes in the call."""

    def __call__(self, x: jax.Array) -> jax.Array:
        self.scale = 0.9 * self.scale + 0.1 * x.mean(0)
        return super().__call__(x)


class Normed(nnx.Module):
    """Statistics are averaged over an axis that jax.pmap would have."""

    def __init__(self, rngs: nnx.Rngs, axis_name: str | None = "batch"):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, axis_name=axis_name, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.up(x))


class LinenNormed(nn.Module):
    axis_name: str | None = "batch"

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(WIDTH)(x)
        return nn.BatchNorm(not train, momentum=0.8, axis_name=self.axis_name)(x)


def averaged(model: Any, batch: dict) -> jax.Array:
    """As flax's ImageNet example calls its ResNet, and averages its loss."""
    out, _ = model(batch["x"], train=True, mutable=["batch_stats"])
    return jax.lax.pmean(squares(out, batch), axis_name="batch")


def plain_averaged(variables: dict, batch: dict) -> tuple[jax.Array, dict]:
    model = LinenNormed(axis_name=None)
    out, state = model.apply(variables, batch["x"], train=True, mutable=["batch_stats"])
    return squares(out, batch), state


class Experts(nn.Module):
    """Two experts by rows, and what they sow: a loss each, summed losses, values."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = x + nn.tanh(nn.Dense(WIDTH)(x))
            self.sow("losses", "aux", jnp.mean(x**2))
            self.sow(
                "sums",
                "aux",
                jnp.mean(jnp.abs(x)),
                reduce_fn=jnp.add,
                init_fn=lambda: jnp.zeros(()),
            )
            self.sow("intermediates", "hidden", x)
        return x


def with_aux(out: jax.Array, sown: dict, batch: dict) -> jax.Array:
    aux = sum(sown["losses"]["aux"]) + sown["sums"]["aux"]
    hidden = sown["intermediates"]["hidden"][0]
    return squares(out, batch) + 0.1 * aux + 0.01 * jnp.mean(hidden**4)


SOWN = ["losses", "sums", "intermediates"]


def sown(model: Any, batch: dict) -> jax.Array:
    return with_aux(*model(batch["x"], mutable=SOWN), batch)


def plain_sown(variables: dict, batch: dict) -> tuple[jax.Array, dict]:
    out = Experts().apply(variables, batch["x"], mutable=SOWN)
    return with_aux(*out, batch), {}


class NnxExperts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nnx.tanh(self.up(x))
        self.sow(nnx.Intermediate, "aux", jnp.mean(x**2))
        return x


def captured(model: Any, batch: dict) -> jax.Array:
    out, found = nnx.capture(model, nnx.Intermediate)(batch["x"])
    return squares(out, batch) + 0.1 * found["aux"][0]


def read(model: Any, batch: dict) -> jax.Array:
    """The older way: what is sown is an attribute."""
    out = model(batch["x"])
    return squares(out, batch) + 0.1 * model.aux.get_value()[0]


def popped(model: Any, batch: dict) -> jax.Array:
    out = model(batch["x"])
    found = nnx.pop(model, nnx.Intermediate)
    return squares(out, batch) + 0.1 * found["aux"].get_value()[0]


class Dropped(nnx.Module):
    """Keys come with the call."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        return self.drop(self.up(x), rngs=rngs)


def keyed(model: Any, batch: dict) -> jax.Array:
    return squares(model(batch["x"], rngs=nnx.Rngs(jax.random.key(3))), batch)


class LinenDropped(nn.Module):
    """Two streams, one with a name of its own."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dropout(0.5, deterministic=False)(nn.Dense(WIDTH)(x))
        return x + 0.1 * jax.random.normal(self.make_rng("noise"), x.shape)


KEYS = {"dropout": jax.random.key(3), "noise": jax.random.key(4)}


def linen_keyed(model: Any, batch: dict) -> jax.Array:
    return squares(model(batch["x"], rngs=KEYS), batch)


def plain_keyed(variables: dict, batch: dict) -> tuple[jax.Array, dict]:
    return squares(LinenDropped().apply(variables, batch["x"], rngs=KEYS), batch), {}


class Annotated(nnx.Module):
    """Dims named for another mesh: one axis, two, or a logical name with its rule."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        up = nnx.with_partitioning(init, ("fsdp", "tp"))
        down = nnx.with_partitioning(
            init, ("hidden", "out"), sharding_rules=(("hidden", "model"), ("out", None))
        )
        out = nnx.with_partitioning(init, (None, ("fsdp", "tp")))
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, kernel_init=down, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, kernel_init=out, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.tanh(self.down(nnx.tanh(self.up(x)))))


class LinenAnnotated(nn.Module):
    """Kernels of several dims, whose names Flax takes for axes of a mesh in context."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        up = nn.with_partitioning(init, ("data", "model", None))
        down = nn.with_partitioning(init, ("heads", None, "fsdp"))
        x = nn.tanh(nn.DenseGeneral((2, WIDTH), kernel_init=up)(x))
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), kernel_init=down)(x)


def plain_annotated(variables: dict, batch: dict) -> tuple[jax.Array, dict]:
    return squares(LinenAnnotated().apply(variables, batch["x"]), batch), {}


class Logical(nn.Module):
    """Logical names, on activations too, for which Flax's context has the axes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        up = nn.with_logical_partitioning(init, ("embed", "kv"))
        down = nn.with_logical_partitioning(init, ("kv", "embed"))
        x = spmd.with_logical_constraint(x, ("activation_batch", "embed"))
        x = nn.tanh(nn.Dense(2 * WIDTH, kernel_init=up)(x))
        x = spmd.with_logical_constraint(x, ("activation_batch", "kv"))
        return nn.Dense(WIDTH, kernel_init=down)(x)


AXIS_RULES = (
    ("activation_batch", "data"),
    ("activation_batch", "fsdp"),
    ("embed", "fsdp"),
    ("kv", "model"),
    ("length", "X"),
)


def plain_logical(variables: dict, batch: dict) -> tuple[jax.Array, dict]:
    return squares(Logical().apply(variables, batch["x"]), batch), {}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.tanh(nn.Dense(WIDTH)(x)), None


class Scanned(nn.Module):
    """A stack by nn.scan over nn.remat, before an attended table."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stack = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = stack()(x, None)
        table = nn.Embed(WIDTH, WIDTH)
        return table.attend(x) + table(jnp.arange(WIDTH)).mean(0)


def plain_scanned(variables: dict, batch: dict) -> tuple[jax.Array, dict]:
    return squares(Scanned().apply(variables, batch["x"]), batch), {}


class NnxScanned(nnx.Module):
    """A stack by nnx.scan over nnx.remat, with a tied kernel behind it."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.stack = stack(rngs)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def apply(layer: nnx.Linear, x: jax.Array) -> jax.Array:
            return x + nnx.tanh(layer(x))

        return self.second(nnx.tanh(self.first(apply(self.stack, x))))


class Half(nnx.Module):
    """Parameters in bf16: the engine's masters are fp32, and are trained as such."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.bfloat16, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.up(self.norm(x))


class Adapted(nnx.Module):
    """LoRA around a kernel that is no parameter, and around one that is."""

    def __init__(self, rngs: nnx.Rngs):
        self.frozen = nnx.Variable(
            nnx.initializers.lecun_normal()(rngs.params(), (WIDTH, WIDTH))
        )
        up = nnx.initializers.normal(0.1)
        self.delta = nnx.LoRA(WIDTH, 2, WIDTH, b_initializer=up, rngs=rngs)
        self.tuned = nnx.LoRALinear(
            WIDTH, WIDTH, lora_rank=2, b_initializer=up, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.tuned(nnx.tanh(x @ self.frozen[...] + self.delta(x)))


CASES = {
    "arrays": Case(Arrays, call),
    "changing_array": Case(Counting, call, coupled=True),
    "axis_name": Case(
        Normed, call, functools.partial(Normed, axis_name=None), coupled=True
    ),
    "linen_axis_name": Case(LinenNormed(), averaged, plain_averaged, coupled=True),
    "linen_sow": Case(Experts(), sown, plain_sown),
    "capture": Case(NnxExperts, captured),
    "sow": Case(NnxExperts, read),
    "pop": Case(NnxExperts, popped),
    "rngs": Case(Dropped, keyed),
    "linen_rngs": Case(LinenDropped(), linen_keyed, plain_keyed),
    "names": Case(Annotated, call),
    "linen_names": Case(LinenAnnotated(), call, plain_annotated),
    "logical_names": Case(Logical(), call, plain_logical, axis_rules=AXIS_RULES),
    "linen_scan": Case(Scanned(), call, plain_scanned),
    "scan": Case(NnxScanned, call),
    "bf16_params": Case(Half, call),
    "lora": Case(Adapted, call),
}
