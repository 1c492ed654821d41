"""Does a step that computes two halves side by side train as one device does?

Tolerances as in test_zero.py: losses and parameters 1e-5, relative.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import jaxpar
from tests.equivalence import problems
from tests.equivalence.looped_gpt import on_one_device, train

CASES: dict[str, dict[str, Any]] = {
    "zero1-tensor2-dropout": {"zero": 1, "data": 2, "tensor": 2, "dropout": 0.1},
    "zero3-tensor2-ahead-full": {
        "zero": 3,
        "data": 2,
        "tensor": 2,
        "prefetch": True,
        "remat": "full",
    },
    "zero0-tensor4": {"zero": 0, "data": 1, "tensor": 4, "dropout": 0.1},
    "zero2-accumulate2": {"zero": 2, "data": 2, "accumulate": 2, "remat": "dots"},
    "zero1-ahead-sequence": {
        "zero": 1,
        "data": 2,
        "tensor": 2,
        "prefetch": True,
        "sequence_parallel": True,
    },
    "zero3-replica2": {"zero": 3, "data": 2, "replica": 2, "prefetch": True},
    "zero3-frozen": {
        "zero": 3,
        "tensor": 2,
        "trainable": ["*/bias", "*attention*", "embed/*"],
    },
}
QUICK = ("zero1-tensor2-dropout", "zero3-tensor2-ahead-full")
NAMED = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough)
    for name in CASES
]


@pytest.mark.parametrize("name", NAMED)
def test_two_halves_train_like_one_device(name: str) -> None:
    case = CASES[name]
    chosen, accumulate = case.get("trainable"), case.get("accumulate", 1)
    of = case.get("dropout", 0.0), accumulate, chosen and tuple(chosen)
    right = on_one_device(*of)
    losses, params = train(two_batch_overlap=True, **case)
    assert losses == pytest.approx(right[0], rel=1e-5)
    assert problems.distance(params, right[1]) <= 1e-5


class Scanned(linen.Module):
    """Linen layers with dropout in a scan, and a weighted mean with metrics."""

    @linen.compact
    def __call__(self, x):
        def layer(module: linen.Dense, x: jax.Array, _: None) -> tuple:
            return jnp.tanh(module(x)) + x, None

        dense = linen.Dense(8, name="layers")
        scan = linen.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        x, _ = scan(dense, x, None)
        return linen.Dense(1)(linen.Dropout(0.2, deterministic=False)(x))


def weighted(model: Any, batch: Any) -> tuple:
    error = (model(batch["x"])[:, 0] - batch["y"]) ** 2
    kept = batch["mask"]
    metrics = {
        "rows": jaxpar.Sum(kept.sum()),
        "worst": jaxpar.Max((error * kept).max()),
    }
    return jaxpar.Weighted((error * kept).sum(), kept.sum()), metrics


@pytest.mark.parametrize("zero", [1, 3])
def test_a_masked_loss_of_a_linen_scan_has_its_values(zero: int) -> None:
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(16, 8)).astype(np.float32),
        "y": rng.normal(size=16).astype(np.float32),
        "mask": (np.arange(16) % 5 < 2).astype(np.float32),
    }

    def train(devices: int, **how: Any) -> list[dict[str, float]]:
        engine = jaxpar.initialize(
            model=Scanned(),
            loss_fn=weighted,
            optimizer=optax.adam(1e-2),
            sample_batch=batch,
            mesh=jaxpar.MeshShape(data=devices),
            devices=jax.devices()[:devices],
            **how,
        )
        return [
            {name: float(x) for name, x in engine.step(batch).items()} for _ in range(3)
        ]

    found = train(4, zero=zero, two_batch_overlap=True)
    for ours, right in zip(found, train(1), strict=True):
        assert ours == pytest.approx(right, rel=1e-5)
