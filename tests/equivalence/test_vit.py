"""Does a ViT train on any mesh as on one device?

SGD with momentum over three steps: losses to 1e-6 and parameters to 1e-5, relative.
With a class token there are 5 tokens, which no tensor axis divides.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.models import VitConfig, classification_loss, make_vit
from jaxpar.models.experts.config import ExpertsConfig
from tests.equivalence import problems

CONFIG = VitConfig(
    image_size=8,
    patch_size=4,
    channels=2,
    num_labels=6,
    num_layers=4,
    num_heads=4,
    width=16,
    mlp_width=32,
)
STEPS = 3
OF_CONFIG = {field.name for field in dataclasses.fields(VitConfig)}

CASES: dict[str, dict[str, Any]] = {
    "zero0-tensor2": {"zero": 0, "data": 2, "tensor": 2},
    "zero1": {"zero": 1, "data": 4},
    "zero2-tensor4": {"zero": 2, "data": 2, "tensor": 4},
    "zero3-tensor2": {"zero": 3, "data": 2, "tensor": 2},
    "zero3-remat": {"zero": 3, "data": 4, "remat": "full", "unroll": 2},
    "zero3-prefetch": {"zero": 3, "data": 2, "prefetch": True},
    "pipe2-zero1": {"zero": 1, "data": 2, "pipe": 2, "accumulate": 2},
    "pipe2-zero3-remat": {
        "zero": 3,
        "data": 2,
        "pipe": 2,
        "accumulate": 2,
        "remat": "full",
    },
    "mean-pipe2-tensor2": {
        "data": 2,
        "pipe": 2,
        "tensor": 2,
        "accumulate": 2,
        "pooling": "mean",
    },
    "sequence-zero0": {"zero": 0, "tensor": 2, "sequence_parallel": True},
    "sequence-zero3": {
        "zero": 3,
        "data": 2,
        "tensor": 2,
        "sequence_parallel": True,
        "dropout": 0.2,
    },
    "sequence-zero2-tensor4": {
        "zero": 2,
        "data": 2,
        "tensor": 4,
        "sequence_parallel": True,
    },
    "sequence-pipe2": {
        "data": 2,
        "pipe": 2,
        "tensor": 2,
        "accumulate": 2,
        "sequence_parallel": True,
    },
    "sequence-mean": {
        "zero": 1,
        "data": 2,
        "tensor": 2,
        "sequence_parallel": True,
        "pooling": "mean",
    },
    "dropped-zero2": {"zero": 2, "data": 4, "dropout": 0.2},
    "dropped-zero3-tensor2": {"zero": 3, "data": 2, "tensor": 2, "dropout": 0.2},
    "dropped-pipe2-tensor2": {
        "data": 2,
        "pipe": 2,
        "tensor": 2,
        "accumulate": 2,
        "dropout": 0.2,
    },
}
EXPERTS = ExpertsConfig(num=4, balance_loss=0.1, router_z_loss=0.01)
EVERY_SECOND = ExpertsConfig(num=4, every=2, capacity_factor=0.75, balance_loss=0.1)
CASES |= {
    "experts-zero3-e2-t2": {
        "zero": 3,
        "data": 2,
        "expert": 2,
        "tensor": 2,
        "experts": EXPERTS,
    },
    "second-zero2-e4": {"zero": 2, "data": 2, "expert": 4, "experts": EVERY_SECOND},
    "second-pipe2-e2-mean": {
        "data": 2,
        "pipe": 2,
        "expert": 2,
        "accumulate": 2,
        "pooling": "mean",
        "experts": EVERY_SECOND,
    },
}
QUICK = ("mean-pipe2-tensor2",)
CHANGE_VALUES = ("accumulate", "dropout", "experts", "pooling")


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "image": rng.normal(size=(8, *CONFIG.image_shape)).astype(np.float32),
            "label": rng.integers(0, CONFIG.num_labels, 8, np.int32),
        }
        for _ in range(STEPS)
    ]


def moved(params: Any) -> Any:
    """Parameters at random: as they begin, biases have hardly a gradient."""
    rng = np.random.default_rng(1)

    def move(leaf: np.ndarray) -> np.ndarray:
        return leaf + 0.2 * rng.normal(size=leaf.shape).astype(np.float32)

    return jax.tree.map(move, jax.device_get(params))


def train(
    *, data: int = 1, pipe: int = 1, tensor: int = 1, expert: int = 1, **given: Any
) -> tuple[list[float], Any]:
    """Losses and parameters of three steps."""
    own = {name: x for name, x in given.items() if name in OF_CONFIG}
    rest = {name: x for name, x in given.items() if name not in OF_CONFIG}
    shape = jaxpar.MeshShape(data=data, pipe=pipe, tensor=tensor, expert=expert)
    engine = jaxpar.initialize(
        model=make_vit(dataclasses.replace(CONFIG, **own)),
        loss_fn=functools.partial(classification_loss, label_smoothing=0.1),
        optimizer=optax.sgd(0.1, momentum=0.9),
        sample_batch=batches()[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
        clip_norm=1.0,
        check_loss=False,
        **rest,
    )
    engine.load_params(moved(engine.state.params))
    losses = [float(engine.step(batch)["loss"]) for batch in batches()]
    return losses, jax.device_get(engine.state.params)


@functools.cache
def on_one_device(**given: Any) -> Any:
    return train(**given)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough)
        for name in CASES
    ],
)
def test_any_mesh_trains_as_one_device_does(name: str) -> None:
    case = CASES[name]
    same = {key: x for key, x in case.items() if key in CHANGE_VALUES}
    losses, params = on_one_device(**same)
    found = train(**case)
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert problems.distance(found[1], params) <= 1e-5
