"""Do batches of several shapes train one state, as a plain loop over them does?"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.optim import diloco, fused_adamw, onebit_adam
from tests.equivalence.cut_batches import (
    SHAPES,
    batch_of,
    batches,
    make_engine,
    trained_plainly,
)
from tests.equivalence.problems import distance

MESHES: dict[str, dict[str, Any]] = {
    "ZeRO 3, tensor": {"data": 2, "tensor": 2, "zero": 3, "accumulate": 2},
    "ZeRO 0": {"data": 4, "zero": 0},
    "ZeRO 1": {"data": 4, "zero": 1, "accumulate": 2},
    "ZeRO 2": {"data": 4, "zero": 2, "accumulate": 2},
    "ZeRO 3": {"data": 8, "zero": 3},
    "tensor": {"tensor": 4, "zero": 0, "accumulate": 4},
    "pipe": {"data": 2, "pipe": 2, "zero": 1, "accumulate": 4},
    "pipe, tensor": {"pipe": 2, "tensor": 2, "zero": 2, "accumulate": 4},
}


def on_mesh(name: str, **given: Any) -> jaxpar.Engine:
    own = {**MESHES[name], **given}
    axes = {axis: own.pop(axis) for axis in ("data", "tensor", "pipe") if axis in own}
    return make_engine(axes, **own)


@pytest.mark.parametrize("name", MESHES)
def test_trains_as_a_plain_loop(name: str, compiled: list[str]) -> None:
    right, params = trained_plainly()
    engine = on_mesh(name)
    compiled.clear()
    losses = [float(engine.step(batch)["loss"]) for batch in batches()]
    assert losses == pytest.approx(right, rel=1e-5)
    assert distance(engine.state.params, params) < 1e-5
    assert compiled.count("jit(step)") == len(SHAPES)


def test_interrupted_run_is_equal_to_the_bit(tmp_path: Path) -> None:
    name, whole = "ZeRO 3, tensor", on_mesh("ZeRO 3, tensor")
    right = [float(whole.step(batch)["loss"]) for batch in batches()]
    engine = on_mesh(name)
    for batch in batches()[:3]:
        engine.step(batch)
    engine.save(tmp_path)
    engine.wait()
    engine = on_mesh(name)
    engine.restore(tmp_path)
    losses = [float(engine.step(batch)["loss"]) for batch in batches()[3:]]
    assert losses == right[3:]
    for one, other in zip(
        jax.tree.leaves(engine.state), jax.tree.leaves(whole.state), strict=True
    ):
        if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["ZeRO 3, tensor", "pipe"])
def test_evaluates_lengths_of_all_shapes(name: str) -> None:
    engine = on_mesh(name)
    for length in (16, 8):
        batch = batch_of(8, length)
        found = engine.evaluate(batch)
        assert float(found["weight"]) == pytest.approx(batch["weights"].sum(), rel=1e-6)
        few, rest = (
            {name: leaf[part] for name, leaf in batch.items()}
            for part in (slice(3), slice(3, None))
        )
        parts = [engine.evaluate(few), engine.evaluate(rest)]
        total = sum(float(p["loss"] * p["weight"]) for p in parts)
        assert float(found["loss"] * found["weight"]) == pytest.approx(total, rel=1e-5)


class Net(nnx.Module):
    """Maps every token by itself."""

    def __init__(self, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.3)
        self.up = nnx.Linear(4, 32, kernel_init=normal, bias_init=normal, rngs=rngs)
        self.out = nnx.Linear(32, 8, kernel_init=normal, bias_init=normal, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jnp.tanh(self.up(x)))


def loss_of_tokens(model: Any, batch: dict) -> jaxpar.Weighted:
    square = jnp.sum((model(batch["x"]) - 1.0) ** 2, -1)
    return jaxpar.Weighted((square * batch["w"]).sum(), batch["w"].sum())


LENGTHS = 2, 2, 6, 2, 6, 6, 2, 6


def tokens(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    x = rng.normal(size=(8, 6, 4)).astype(np.float32)
    kept = (np.arange(6) < LENGTHS[step]).astype(np.float32)
    return {"x": x, "w": np.broadcast_to(kept, (8, 6))}


def cut(batch: dict[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
    return {name: leaf[:, :length] for name, leaf in batch.items()}


HOST: dict[str, Any] = {"update": "host", "piece_mb": 0.0002}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "delayed": {
        "optimizer": optax.adamw(1e-2),
        "precision": "bf16",
        "offload": jaxpar.Offload(**HOST, delayed=True, delay_after=2),
    },
    "on the host": {
        "optimizer": optax.adamw(1e-2),
        "precision": "bf16",
        "offload": jaxpar.Offload(**HOST),
    },
    "in host memory": {"offload": jaxpar.Offload(optimizer="host")},
    "fused": {"optimizer": fused_adamw(1e-2)},
    "8 bits": {"optimizer": fused_adamw(1e-2, bits=8)},
    "1-bit Adam": {"optimizer": onebit_adam(1e-2, freeze_step=3), "zero": 1},
    "DiLoCo": {
        "optimizer": diloco(optax.adamw(1e-2), replicas=2, every=3),
        "mesh": jaxpar.MeshShape(replica=2, data=2),
        "zero": 1,
    },
    "ema": {"carried": [jaxpar.Ema(0.9)]},
    "fp16": {"precision": "fp16"},
    "ZeRO++": {"zero": jaxpar.optim.ZeroPlusPlus(3, weight_bits=8)},
}


def of_technique(name: str, **given: Any) -> jaxpar.Engine:
    own = {
        "model": lambda rngs: Net(rngs),
        "loss_fn": loss_of_tokens,
        "optimizer": optax.adamw(1e-2),
        "sample_batch": tokens(0),
        "mesh": jaxpar.MeshShape(data=4),
        "zero": 3,
        **TECHNIQUES[name],
        **given,
    }
    devices = jax.devices()[: own["mesh"].num_devices]
    return jaxpar.initialize(**own, devices=devices)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_technique_goes_on_with_its_own_state(name: str) -> None:
    """As an engine of one shape on whole rows, where what is cut here has no weight."""
    right = of_technique(name)
    engine = of_technique(name, other_shapes=[cut(tokens(0), 2)])
    for step, length in enumerate(LENGTHS):
        expected = float(right.step(tokens(step))["loss"])
        found = float(engine.step(cut(tokens(step), length))["loss"])
        assert found == pytest.approx(expected, rel=1e-5), step
    # With late gradients the state has them once it is saved.
    right._settle()
    engine._settle()
    assert distance(engine.state.params, right.state.params) < 1e-5
