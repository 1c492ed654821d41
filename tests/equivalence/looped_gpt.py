"""A small GPT with a loop over its layers, trained for a few steps on any mesh."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax

import jaxpar
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder

CONFIG = DecoderConfig(
    vocab_size=64,
    seq_len=16,
    num_layers=3,
    num_heads=4,
    width=32,
    positions="rotary",
    norm="rmsnorm",
    activation="swiglu",
)
STEPS = 3
OF_CONFIG = {field.name for field in dataclasses.fields(DecoderConfig)}


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (8, CONFIG.seq_len + 1)
    return [{"tokens": rng.integers(0, 64, shape, np.int32)} for _ in range(STEPS)]


def train(
    *,
    data: int = 4,
    pipe: int = 1,
    tensor: int = 1,
    replica: int = 1,
    expert: int = 1,
    **given: Any,
) -> tuple[list[float], Any]:
    config = dataclasses.replace(
        CONFIG, **{name: x for name, x in given.items() if name in OF_CONFIG}
    )
    rest = {name: x for name, x in given.items() if name not in OF_CONFIG}
    shape = jaxpar.MeshShape(
        data=data, pipe=pipe, tensor=tensor, replica=replica, expert=expert
    )
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        sample_batch=batches()[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
        clip_norm=1.0,
        check_loss=False,
        **{"optimizer": optax.adamw(1e-3, eps=1e-6), **rest},
    )
    said = "two_batch_overlap: each device computes the two halves"
    is_halved = any(line.startswith(said) for line in engine.spec.remarks)
    assert is_halved == bool(rest.get("two_batch_overlap")), engine.spec.remarks
    losses = [float(engine.step(batch)["loss"]) for batch in batches()]
    return losses, jax.device_get(engine.state.params)


@functools.cache
def on_one_device(dropout: float, accumulate: int, trainable: tuple | None) -> Any:
    how = {"dropout": dropout, "accumulate": accumulate}
    return train(data=1, trainable=trainable and list(trainable), **how)
