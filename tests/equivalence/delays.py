"""What asynchronous schedules train, by their definition: one device, every version of
the parameters kept, each piece of work by the tick in which its stage does it.

It shares nothing with the pipeline but the modules: a small model as three Flax parts.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.models.layers import Embedding, Linear, project_to_logits
from jaxpar.models.norms import LayerNorm
from jaxpar.pipeline.schedules.asynchronous import (
    Asynchronous,
    PipeDream2BW,
    PipeMare,
)

WIDTH, VOCAB, LENGTH, CLIP = 16, 32, 4, 0.25


class Embed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tokens = Embedding((VOCAB, WIDTH), ("vocab", "embed"), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jaxpar.constrain(10 * self.tokens(tokens), "data")


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = LayerNorm(WIDTH)
        self.up = Linear((WIDTH, 32), ("embed", "mlp"), stddev=0.1, rngs=rngs)
        self.down = Linear((32, WIDTH), ("mlp", "embed"), stddev=0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jaxpar.constrain(self.up(self.norm(x)), "data", None, "tensor")
        return x + self.down(jnp.tanh(hidden))


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = LayerNorm(WIDTH)
        self.tokens = Embedding((VOCAB, WIDTH), ("vocab", "embed"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return project_to_logits(self.norm(x), 5 * self.tokens.table[...].T)


def total_and_weight(logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
    """Masked next-token cross entropy."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["tokens"][:, 1:]
    )
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


def loss_fn(model: Callable, batch: dict) -> jaxpar.Weighted:
    return jaxpar.Weighted(*total_and_weight(model(batch["tokens"][:, :-1]), batch))


def make_model(num_blocks: int, *, tied: bool, remat: str) -> jaxpar.PipelineModel:
    both = (("embed", "tokens/table"), ("head", "tokens/table"))
    return jaxpar.PipelineModel(
        embed=Embed,
        sections=[(Block, num_blocks)],
        head=Head,
        tied=both if tied else (),
        remat=remat,
        allow_uneven=True,
    )


@functools.cache
def make_batches(rows: int, count: int) -> list[dict[str, np.ndarray]]:
    """Masks weigh differently on every row; some tokens are frequent."""
    rng, kept = np.random.default_rng(0), np.linspace(0.95, 0.1, rows)[:, None]
    frequency = 1.0 / np.arange(1, VOCAB + 1)
    shape, frequency = (rows, LENGTH + 1), frequency / frequency.sum()
    return [
        {
            "tokens": rng.choice(VOCAB, shape, p=frequency).astype(np.int32),
            "mask": (rng.random((rows, LENGTH)) < kept).astype(np.float32),
        }
        for _ in range(count)
    ]


def call_plainly(make: Callable[[nnx.Rngs], Any], params: dict, x: jax.Array) -> Any:
    """One module with these parameters, by Flax alone."""
    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        graphdef, like, _ = nnx.split(model, nnx.Param, ...)
        nnx.replace_by_pure_dict(like, params)
        return nnx.merge(graphdef, like)(x)


@dataclasses.dataclass
class Trained:
    """Losses by batch, and the parameters after the last."""

    losses: list[float]
    params: dict


@dataclasses.dataclass(frozen=True)
class Delays:
    """A run with the delays of a schedule on `pipe` stages.

    Attributes:
      kind: the schedule.
      pipe, accumulate: stages and micro-batches.
      blocks: of the model.
      optimizer: gets clipped gradients.
    """

    kind: Asynchronous
    pipe: int
    accumulate: int
    blocks: int
    optimizer: optax.GradientTransformation

    @property
    def total(self) -> int:
        """Ticks between the first stage's forward and its backward."""
        return 2 * (self.pipe - 1)

    @property
    def delay(self) -> int:
        return math.ceil(self.total / self.accumulate)

    def step_of(self, batch: int, m: int, ticks: int) -> int:
        """The step of the tick that is `ticks` after the first stage's forward."""
        start = self.delay * self.accumulate - self.total
        return batch + (start + m + ticks) // self.accumulate

    def run(self, params: dict, batches: Sequence[dict]) -> Trained:
        """Train on the batches, and drain."""
        with jax.enable_x64(True):
            params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
            versions, means = [params], [jax.tree.map(jnp.zeros_like, params)]
            opt_state, losses = self.optimizer.init(params), []
            for step in range(len(batches) + self.delay):
                newest = params
                if step >= self.delay:
                    number = step - self.delay
                    grads, loss = self.gradients(
                        versions, means, number, batches[number]
                    )
                    losses.append(float(loss))
                    params, opt_state = self.update(newest, opt_state, grads, step)
                versions.append(params)
                means.append(self.mean_update(means[-1], newest, params))
            return Trained(losses, jax.device_get(params))

    def gradients(
        self, versions: list, means: list, number: int, batch: dict
    ) -> tuple[dict, jax.Array]:
        """Of a batch, its rows taken by micro-batch; and its loss."""
        if isinstance(self.kind, PipeDream2BW):
            return _plain(versions[number], batch)
        grads: Any = jax.tree.map(jnp.zeros_like, versions[0])
        total = weight = 0.0
        for m in range(self.accumulate):
            rows = jax.tree.map(lambda x, m=m: x[m :: self.accumulate], batch)
            forward = [versions[self.step_of(number, m, s)] for s in range(self.pipe)]
            late = [self.step_of(number, m, self.total - s) for s in range(self.pipe)]
            backward = [
                self.corrected(versions[step], means[step], s)
                for s, step in enumerate(late)
            ]
            made, loss, own = _microbatch(self.firsts, forward, backward, rows)
            grads = jax.tree.map(jnp.add, grads, made)
            total, weight = total + loss, weight + own
        return jax.tree.map(lambda g: g / weight, grads), total / weight

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first block of each stage, and the number of all."""
        least, more = divmod(self.blocks, self.pipe)
        counts = [least + (s < more) for s in range(self.pipe)]
        return tuple(sum(counts[:s]) for s in range(self.pipe + 1))

    def corrected(self, params: dict, mean: dict, stage: int) -> dict:
        """What a backward of a stage uses."""
        assert isinstance(self.kind, PipeMare), "it alone has backwards of their own"
        late = (self.total - 2 * stage) / self.accumulate
        if self.kind.decay is None:
            return params
        return jax.tree.map(lambda x, d: x - late * d, params, mean)

    def by_stage(self, value: Callable[[int], float], tree: dict) -> dict:
        """A value for every parameter, by its stage."""
        firsts = self.firsts
        stages = np.searchsorted(firsts[1:], np.arange(self.blocks), side="right")
        blocks = np.array([value(int(s)) for s in stages])
        of_part = {"embed": value(0), "head": value(self.pipe - 1)}
        return {
            part: jax.tree.map(
                lambda x, part=part: (
                    of_part[part]
                    if part in of_part
                    else blocks.reshape(-1, *[1] * (x.ndim - 1))
                ),
                own,
            )
            for part, own in tree.items()
        }

    def mean_update(self, mean: dict, before: dict, after: dict) -> dict:
        if not isinstance(self.kind, PipeMare):
            return mean
        kind = self.kind

        def weight(stage: int) -> float:
            late = (self.total - 2 * stage) / self.accumulate
            return (kind.decay or 0.0) ** (1 / late) if late > 0 else 0.0

        return jax.tree.map(
            lambda w, d, old, new: w * d + (1 - w) * (new - old),
            *(self.by_stage(weight, mean), mean, before, after),
        )

    def update(
        self, params: dict, opt_state: Any, grads: dict, step: int
    ) -> tuple[dict, Any]:
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / norm), grads)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        if isinstance(self.kind, PipeMare) and self.kind.annealing_steps:
            power = 1 - min(step / self.kind.annealing_steps, 1.0)

            def rate(stage: int) -> float:
                tau = (self.total - stage) / self.accumulate
                return max(tau, 1.0) ** -power

            rates = self.by_stage(rate, updates)
            updates = jax.tree.map(jnp.multiply, updates, rates)
        return optax.apply_updates(params, updates), opt_state


def _logits(params: dict, tokens: jax.Array) -> jax.Array:
    x = call_plainly(Embed, params["embed"], tokens)
    x = _blocks(params["blocks"], x)
    return _head(params, x)


def _blocks(blocks: dict, x: jax.Array) -> jax.Array:
    for layer in range(len(jax.tree.leaves(blocks)[0])):
        own = jax.tree.map(lambda leaf, layer=layer: leaf[layer], blocks)
        x = call_plainly(Block, own, x)
    return x


def _head(params: dict, x: jax.Array) -> jax.Array:
    table = params["head"].get("tokens", params["embed"]["tokens"])
    return call_plainly(Head, {**params["head"], "tokens": table}, x)


@jax.jit
def _plain(params: dict, batch: dict) -> tuple[dict, jax.Array]:
    def mean(params: dict) -> jax.Array:
        total, weight = total_and_weight(
            _logits(params, batch["tokens"][:, :-1]), batch
        )
        return total / weight

    loss, grads = jax.value_and_grad(mean)(params)
    return grads, loss


@functools.partial(jax.jit, static_argnums=0)
def _microbatch(
    firsts: tuple[int, ...], forward: list, backward: list, rows: dict
) -> tuple[dict, jax.Array, jax.Array]:
    """Gradients of a micro-batch's total, from each stage's own versions."""

    def stage_of(params: dict, stage: int) -> dict:
        first, last = firsts[stage : stage + 2]
        return jax.tree.map(lambda x: x[first:last], params["blocks"])

    tokens = rows["tokens"][:, :-1]
    inputs = [call_plainly(Embed, forward[0]["embed"], tokens)]
    for s, params in enumerate(forward):
        inputs.append(_blocks(stage_of(params, s), inputs[-1]))
    tied = {"embed": forward[-1]["embed"], "head": forward[-1]["head"]}

    def total(params: dict, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return total_and_weight(_head(params, x), rows)

    loss, pull, weight = jax.vjp(total, tied, inputs[-1], has_aux=True)
    ends, cotangent = pull(jnp.ones_like(loss))
    grads = jax.tree.map(jnp.zeros_like, forward[0])
    grads = {**grads, "head": ends["head"]}
    made = []
    for s in reversed(range(len(forward))):
        _, pull = jax.vjp(_blocks, stage_of(backward[s], s), inputs[s])
        own, cotangent = pull(cotangent)
        made.insert(0, own)
    grads["blocks"] = jax.tree.map(lambda *x: jnp.concatenate(x), *made)
    _, pull = jax.vjp(lambda p: call_plainly(Embed, p, tokens), backward[0]["embed"])
    grads["embed"] = jax.tree.map(jnp.add, pull(cotangent)[0], ends["embed"])
    return grads, loss, weight
