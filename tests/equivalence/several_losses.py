"""Four runs of several models and losses, and the same in plain JAX on one device.

A generator and a discriminator in turn, an actor and a critic with a target network, a
policy tuned by preferences beside its frozen reference, a student and its teacher.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar

ROWS, STATE, ACTION, WIDTH, VOCAB, LENGTH = 16, 6, 2, 64, 13, 5
RATE, DECAY, BETA = 1e-2, 0.8, 0.5
STEPS = 4
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


class Perceptron(nnx.Module):
    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.3)
        self.up = nnx.Linear(inputs, WIDTH, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(WIDTH, outputs, kernel_init=init, rngs=rngs)

    def __call__(self, *inputs: jax.Array) -> jax.Array:
        return self.out(jnp.tanh(self.up(jnp.concatenate(inputs, -1))))


class Speaker(nnx.Module):
    """Log-probabilities of the next tokens, added up over a sequence."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.3)
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=init, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCAB, kernel_init=init, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        logits = self.out(jnp.tanh(self.embed(tokens[:, :-1])))
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return found[..., 0].sum(-1)


def perceptron(inputs: int, outputs: int) -> Callable[[nnx.Rngs], nnx.Module]:
    return lambda rngs: Perceptron(inputs, outputs, rngs)


def disc_loss(models: Any, batch: Any) -> jax.Array:
    real, fake = (
        models["disc"](x) for x in (batch["state"], models["gen"](batch["noise"]))
    )
    return jnp.mean(jax.nn.softplus(-real) + jax.nn.softplus(fake))


def gen_loss(models: Any, batch: Any) -> jax.Array:
    return jnp.mean(jax.nn.softplus(-models["disc"](models["gen"](batch["noise"]))))


def critic_loss(models: Any, batch: Any) -> jax.Array:
    action = models["actor"](batch["next"])
    value = models["target"](batch["next"], action)
    wanted = batch["reward"] + 0.9 * value[:, 0]
    found = models["critic"](batch["state"], batch["action"])[:, 0]
    return jnp.mean((found - wanted) ** 2)


def actor_loss(models: Any, batch: Any) -> jax.Array:
    state = batch["state"]
    return -jnp.mean(models["critic"](state, models["actor"](state)))


def preference_loss(models: Any, batch: Any) -> Any:
    def margin(model: Any) -> jax.Array:
        return model(batch["chosen"]) - model(batch["rejected"])

    gain = BETA * (margin(models["policy"]) - margin(models["reference"]))
    return jnp.mean(jax.nn.softplus(-gain)), {"right": jnp.mean(gain > 0)}


def student_loss(models: Any, batch: Any) -> jax.Array:
    wanted = jax.nn.softmax(models["teacher"](batch["state"]))
    return -jnp.mean(
        jnp.sum(wanted * jax.nn.log_softmax(models["student"](batch["state"])), -1)
    )


@functools.cache
def batches() -> list[dict[str, np.ndarray]]:
    def one() -> dict[str, np.ndarray]:
        tokens = RNG.integers(0, VOCAB, (2, ROWS, LENGTH)).astype(np.int32)
        return {
            "state": normal(ROWS, STATE),
            "next": normal(ROWS, STATE),
            "noise": normal(ROWS, STATE),
            "action": normal(ROWS, ACTION),
            "reward": normal(ROWS),
            "chosen": tokens[0],
            "rejected": tokens[1],
        }

    return [one() for _ in range(STEPS)]


@dataclasses.dataclass(frozen=True)
class Run:
    """Models and losses, taken in turn.

    Attributes:
      models: name -> factory.
      losses: loss -> function, in the order of a round.
      trains: loss -> the model that it trains.
      options: more arguments of `jaxpar.initialize`.
    """

    models: Mapping[str, Any]
    losses: Mapping[str, Callable]
    trains: Mapping[str, str]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


RUNS = {
    "adversarial": Run(
        {"gen": perceptron(STATE, STATE), "disc": perceptron(STATE, 1)},
        {"disc": disc_loss, "gen": gen_loss},
        {"disc": "disc", "gen": "gen"},
    ),
    "actor and critic": Run(
        {
            "actor": perceptron(STATE, ACTION),
            "critic": perceptron(STATE + ACTION, 1),
        },
        {"critic": critic_loss, "actor": actor_loss},
        {"critic": "critic", "actor": "actor"},
        {"carried": {"critic": [jaxpar.Ema(DECAY, name="target")]}},
    ),
    "preferences": Run(
        {"policy": lambda rngs: Speaker(rngs), "reference": lambda rngs: Speaker(rngs)},
        {"preference": preference_loss},
        {"preference": "policy"},
        {"init_from": {"reference": "policy"}, "trains": {"preference": ["policy/*"]}},
    ),
    "distillation": Run(
        {"teacher": perceptron(STATE, 8), "student": perceptron(STATE, 8)},
        {"student": student_loss},
        {"student": "student"},
    ),
}


def make_optimizer() -> Any:
    return optax.adam(RATE)


def make_engine(name: str, shape: jaxpar.MeshShape, zero: int, **change: Any) -> Any:
    run = RUNS[name]
    arguments = {
        "model": run.models,
        "loss_fn": run.losses,
        "optimizer": {loss: make_optimizer() for loss in run.losses},
        "sample_batch": batches()[0],
        "mesh": jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
        "zero": zero,
        "rules": {
            f"{model}/up/kernel": jax.P(None, "tensor")
            for model in run.models
            if name != "preferences"
        },
    }
    return jaxpar.initialize(**{**arguments, **run.options, **change})


def apply(model: str, params: Mapping[str, Any]) -> Callable[..., jax.Array]:
    """A model in plain JAX, from its parameters."""

    def linear(own: Mapping[str, Any], x: jax.Array) -> jax.Array:
        return x @ own["kernel"] + own["bias"]

    def perceptron(*inputs: jax.Array) -> jax.Array:
        hidden = jnp.tanh(linear(params["up"], jnp.concatenate(inputs, -1)))
        return linear(params["out"], hidden)

    def speaker(tokens: jax.Array) -> jax.Array:
        rows = jnp.asarray(params["embed"]["embedding"])[tokens[:, :-1]]
        logits = linear(params["out"], jnp.tanh(rows))
        found = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(found, tokens[:, 1:, None], -1)[..., 0].sum(-1)

    return speaker if model in ("policy", "reference") else perceptron


def plain_loss(
    trained: Any, own: str, fn: Callable, params: Mapping[str, Any], batch: Any
) -> jax.Array:
    """A loss as a function of what it trains."""
    now = {**params, own: trained}
    out = fn({model: apply(model, now[model]) for model in now}, batch)
    return out[0] if isinstance(out, tuple) else out


@functools.cache
def plain_run(name: str) -> tuple[list[list[float]], dict[str, Any]]:
    """Rounds of losses and the last parameters of a loop on one device."""
    run = RUNS[name]
    state = make_engine(name, jaxpar.MeshShape(data=1), 0).state
    params = {**jax.device_get(state.params), **jax.device_get(state.frozen)}
    if "target" in str(run.options):
        params["target"] = params["critic"]
    optimizer = make_optimizer()
    moments = {loss: optimizer.init(params[own]) for loss, own in run.trains.items()}
    rounds: list[list[float]] = []
    for batch in batches():
        found = []
        for loss, fn in run.losses.items():
            own = run.trains[loss]

            value, grads = jax.value_and_grad(plain_loss)(
                params[own], own, fn, params, batch
            )
            updates, moments[loss] = optimizer.update(grads, moments[loss], params[own])
            params[own] = optax.apply_updates(params[own], updates)
            if own == "critic":
                params["target"] = jax.tree.map(
                    lambda old, new: DECAY * old + (1 - DECAY) * new,
                    params["target"],
                    params["critic"],
                )
            found.append(float(value))
        rounds.append(found)
    return rounds, params


def trained(engine: Any, losses: Sequence[str]) -> list[list[float]]:
    return [
        [float(engine.step(batch, loss=loss)["loss"]) for loss in losses]
        for batch in batches()
    ]
