"""Is every dropout mask drawn once, and the same on every mesh?

The models drop ones, so what is left is the mask. Each row's two masks of twelve units
come out as the bits of one number, a metric, exact in fp32.
"""

import functools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar

ROWS, UNITS = 16, 12
ALL_KEPT = 2 ** (2 * UNITS) - 1
BATCH = {"row": np.arange(ROWS, dtype=np.int32)}


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones((UNITS, 32)))
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, ones: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        first, second = self.first(ones), self.second(ones)
        return first, second, (first + second) @ self.scale


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, ones: jax.Array, *, training: bool) -> tuple:
        first = nn.Dropout(0.5, deterministic=not training)(ones)
        second = nn.Dropout(0.5, deterministic=not training)(ones)
        return first, second, nn.Dense(32)(first + second)


def loss_fn(model: Any, batch: dict) -> tuple[jax.Array, dict[str, jaxpar.Weighted]]:
    told = {"training": model.training} if hasattr(model, "training") else {}
    first, second, out = model(jnp.ones((len(batch["row"]), UNITS)), **told)
    bits = jnp.concatenate([first, second], axis=1) > 0
    codes = bits @ (2.0 ** jnp.arange(2 * UNITS))
    metrics = {}
    for row in range(ROWS):
        here = (batch["row"] == row).astype(jnp.float32)
        metrics[f"row{row}"] = jaxpar.Weighted((codes * here).sum(), here.sum())
    return (out**2).mean(), metrics


CASES = {
    "manual": {"model": lambda rngs: NnxNet(rngs), "zero": 3, "tensor": 2},
    "manual_0": {"model": lambda rngs: NnxNet(rngs), "zero": 0, "tensor": 2},
    "coupled": {"model": NnxNet, "zero": 2, "tensor": 2, "coupled_batch": True},
    "linen": {"model": LinenNet(), "zero": 1, "tensor": 1},
    "one_device": {
        "model": NnxNet,
        "tensor": 1,
        "mesh": jaxpar.MeshShape(data=1),
    },
    "data_8": {"model": NnxNet, "zero": 2, "tensor": 1},
    "other_seed": {"model": NnxNet, "zero": 3, "tensor": 2, "seed": 1},
}


@functools.cache
def make_engine(name: str) -> jaxpar.Engine:
    case = dict(CASES[name])
    return jaxpar.initialize(
        loss_fn=loss_fn,
        optimizer=optax.sgd(1e-3),
        sample_batch=BATCH,
        accumulate=2,
        **{"mesh": jaxpar.MeshShape(data=-1, tensor=case.pop("tensor"))} | case,
    )


@functools.cache
def first_masks(name: str) -> np.ndarray:
    """Masks of the engine's first three steps, [step, row]."""
    engine = make_engine(name)
    assert int(engine.state.step) == 0
    return np.array([masks_of(engine.step(BATCH)) for _ in range(3)])


def masks_of(metrics: dict[str, jax.Array]) -> list[int]:
    return [int(metrics[f"row{row}"]) for row in range(ROWS)]


@pytest.mark.parametrize("name", ["manual", "coupled", "linen"])
def test_masks_differ_across_rows_shards_microbatches_and_steps(name: str) -> None:
    masks = first_masks(name)
    assert len(np.unique(masks)) == masks.size
    # Of 48 pairs of twelve bits one may be equal by chance.
    assert (masks // 2**UNITS == masks % 2**UNITS).sum() <= 1, "two layers, one mask"
    kept = np.mean([code.bit_count() for code in masks.ravel().tolist()]) / (2 * UNITS)
    assert kept == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("name", ["manual", "manual_0", "coupled", "data_8"])
def test_masks_are_those_of_one_device_on_every_mesh_and_stage(name: str) -> None:
    np.testing.assert_array_equal(first_masks(name), first_masks("one_device"))


def test_masks_differ_for_another_seed() -> None:
    both = np.concatenate([first_masks("manual"), first_masks("other_seed")])
    assert len(np.unique(both)) == both.size


@pytest.mark.parametrize("name", ["manual", "linen"])
def test_evaluation_drops_nothing(name: str) -> None:
    assert masks_of(make_engine(name).evaluate(BATCH)) == [ALL_KEPT] * ROWS


def test_masks_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    for name in ("manual", "other_seed"):
        first_masks(name)
    engine, other = make_engine("manual"), make_engine("other_seed")
    engine.save(tmp_path)
    right = [masks_of(engine.step(BATCH)) for _ in range(2)]
    engine.wait()
    other.restore(tmp_path)
    assert [masks_of(other.step(BATCH)) for _ in range(2)] == right
