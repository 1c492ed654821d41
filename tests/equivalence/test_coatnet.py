"""Does a CoAtNet train on any mesh as on one device?

SGD with momentum over three steps: losses to 1e-6 and parameters to 1e-5, relative.
With batch statistics the data axis is automatic, and the statistics are compared too;
with group norms there are pipelines as well.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.models.classification import classification_loss
from jaxpar.models.coatnet.config import CoatnetConfig
from jaxpar.models.coatnet.model import make_coatnet
from tests.equivalence import problems

CONFIG = CoatnetConfig(
    num_classes=6,
    image_size=32,
    channels=1,
    stem_width=4,
    stem_stride=1,
    widths=(4, 8, 16, 16),
    depths=(2, 3, 3, 2),
    head_size=8,
    norm="group",
    norm_groups=2,
    allow_uneven=True,
)
STEPS = 3
OF_CONFIG = {field.name for field in dataclasses.fields(CoatnetConfig)}

CASES: dict[str, dict[str, Any]] = {
    "zero0-tensor2": {"zero": 0, "data": 2, "tensor": 2},
    "zero1": {"zero": 1, "data": 4},
    "zero2-tensor2": {"zero": 2, "data": 2, "tensor": 2},
    "zero3-tensor2": {"zero": 3, "data": 2, "tensor": 2},
    "zero3-full-remat": {"zero": 3, "data": 4, "remat": "full", "unroll": 2},
    # On two or four of eight devices XLA:CPU aborts: docs/parallelism.md.
    "zero3-prefetch": {"zero": 3, "data": 8, "prefetch": True},
    "pipe2": {"zero": 0, "data": 1, "pipe": 2, "accumulate": 2},
    "pipe2-zero1": {"zero": 1, "data": 2, "pipe": 2, "accumulate": 2},
    "pipe2-tensor2": {"data": 2, "pipe": 2, "tensor": 2, "accumulate": 2},
    "pipe2-zero3": {"zero": 3, "data": 2, "pipe": 2, "accumulate": 2, "remat": "full"},
    "dropped-zero2": {"zero": 2, "data": 4, "stochastic_depth": 0.3},
    "dropped-tensor2-pipe2": {
        "data": 2,
        "tensor": 2,
        "pipe": 2,
        "accumulate": 2,
        "stochastic_depth": 0.3,
    },
    "widen-tensor2": {"data": 1, "tensor": 2, "stride_in": "widen"},
    "batch-zero0": {"zero": 0, "data": 2, "norm": "batch"},
    "batch-zero1": {"zero": 1, "data": 2, "norm": "batch"},
    "batch-zero2": {"zero": 2, "data": 4, "norm": "batch", "accumulate": 2},
    "batch-zero3-tensor2": {"zero": 3, "data": 2, "tensor": 2, "norm": "batch"},
    "batch-zero3-remat": {"zero": 3, "data": 4, "norm": "batch", "remat": "full"},
    "batch-dropped": {"zero": 2, "data": 2, "norm": "batch", "stochastic_depth": 0.3},
}
CHANGE_VALUES = ("norm", "accumulate", "stochastic_depth", "stride_in")


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "image": rng.normal(size=(8, 32, 32, 1)).astype(np.float32),
            "label": rng.integers(0, 6, 8, np.int32),
        }
        for _ in range(STEPS)
    ]


def moved(params: Any) -> Any:
    """Parameters at random: as they begin, biases have hardly a gradient."""
    rng = np.random.default_rng(1)

    def move(leaf: np.ndarray) -> np.ndarray:
        return leaf + 0.3 * rng.normal(size=leaf.shape).astype(np.float32)

    return jax.tree.map(move, jax.device_get(params))


def train(
    *, data: int = 1, pipe: int = 1, tensor: int = 1, **given: Any
) -> tuple[list[float], Any, Any]:
    """Losses, parameters and running statistics of three steps."""
    own = {name: x for name, x in given.items() if name in OF_CONFIG}
    rest = {name: x for name, x in given.items() if name not in OF_CONFIG}
    shape = jaxpar.MeshShape(data=data, pipe=pipe, tensor=tensor)
    engine = jaxpar.initialize(
        model=make_coatnet(dataclasses.replace(CONFIG, **own)),
        loss_fn=classification_loss,
        optimizer=optax.sgd(0.1, momentum=0.9),
        sample_batch=batches()[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
        clip_norm=1.0,
        check_loss=False,
        **rest,
    )
    engine.load_params(moved(engine.state.params))
    assert engine.spec.coupled == (own.get("norm") == "batch")
    losses = [float(engine.step(batch)["loss"]) for batch in batches()]
    return losses, *jax.device_get((engine.state.params, engine.state.model_state))


@functools.cache
def on_one_device(**given: Any) -> Any:
    return train(**given)


SOME = ("zero0-tensor2", "zero3-tensor2", "pipe2-zero1", "batch-zero1", "batch-dropped")
"""Half a minute each: convolutions compile long. The others take ten minutes."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.thorough if name in SOME else pytest.mark.slow
        )
        for name in CASES
    ],
)
def test_any_mesh_trains_as_one_device_does(name: str) -> None:
    case = CASES[name]
    same = {key: x for key, x in case.items() if key in CHANGE_VALUES}
    losses, params, state = on_one_device(**same)
    found = train(**case)
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert problems.distance(found[1], params) <= 1e-5
    assert bool(jax.tree.leaves(state)) == (case.get("norm") == "batch")
    if jax.tree.leaves(state):
        assert problems.distance(found[2], state) <= 1e-5
