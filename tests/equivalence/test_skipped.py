"""Does a step that must not count change nothing: overflows, batches of no weight?

The overflow is planted in the rows of one data shard; every shard must skip.
"""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.checkpoint import Checkpoints

pytestmark = pytest.mark.filterwarnings(
    "ignore::jaxpar.engine.run_ahead.SkippedStepWarning"
)

ROWS, WIDTH = 16, 24
# Finite values whose gradients are not: in fp32, and in fp16 with the loss scaled.
PLANTED = {"fp32": 1e30, "fp16": 6e4}


class Net(nnx.Module):
    def __init__(self, *, has_norm: bool, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(WIDTH, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs) if has_norm else None
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.hidden(x.astype(self.hidden.kernel.dtype))
        return self.out(nnx.tanh(h if self.norm is None else self.norm(h)))


def loss_fn(model: Net, batch: dict) -> jaxpar.Weighted:
    error = (model(batch["x"])[:, 0].astype(jnp.float32) - batch["y"]) ** 2
    scale = jnp.max(jnp.abs(batch["x"]), axis=1)
    # Small enough that fp16 holds the gradients at the scaler's start.
    loud = jnp.where(scale > 1e3, scale * scale, 0.01)
    return jaxpar.Weighted((error * loud * batch["w"]).sum(), batch["w"].sum())


def make_batch(planted: float | None = None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    if planted is not None:
        x[-1] = planted
    return {"x": x, "y": x[:, 0].clip(-1, 1), "w": np.ones(ROWS, np.float32)}


def make_engine(zero: int, precision: str, *, has_norm: bool = False) -> jaxpar.Engine:
    return jaxpar.initialize(
        model=lambda rngs: Net(has_norm=has_norm, rngs=rngs),
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-3),
        sample_batch=make_batch(),
        mesh=jaxpar.MeshShape(data=4, tensor=2),
        zero=zero,
        precision=precision,
        clip_norm=1.0,
    )


shared_engine = functools.cache(make_engine)


def bits(*trees: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trees)]


def bits_of(state: Any) -> list[bytes]:
    return bits(state.params, state.opt_state, state.model_state)


def check_overflow_is_skipped(engine: jaxpar.Engine, planted: float) -> None:
    engine.step(make_batch())
    before, step = bits_of(engine.state), int(engine.state.step)
    skipped = int(engine.state.carried["loss_scale"].skipped)
    metrics = engine.step(make_batch(planted))
    assert not np.isfinite(metrics["grad_norm"])
    assert bits_of(engine.state) == before
    assert int(metrics["skipped"]) == skipped + 1
    assert int(engine.state.step) == step + 1
    metrics = engine.step(make_batch())
    assert int(metrics["skipped"]) == skipped + 1
    after = bits_of(engine.state)
    assert all(new != old for new, old in zip(after, before, strict=True))


CASES = list(itertools.product((0, 1, 2, 3), ("fp32", "fp16")))
FIRST = [(0, "fp16"), (1, "fp32"), (2, "fp32"), (3, "fp16")]


@pytest.mark.parametrize(("zero", "precision"), FIRST)
def test_overflow_in_one_shard_changes_nothing(zero: int, precision: str) -> None:
    engine = shared_engine(zero, precision)
    check_overflow_is_skipped(engine, PLANTED[precision])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "precision"), [case for case in CASES if case not in FIRST]
)
def test_overflow_in_one_shard_changes_nothing_in_the_rest_of_the_cross(
    zero: int, precision: str
) -> None:
    check_overflow_is_skipped(make_engine(zero, precision), PLANTED[precision])


@pytest.mark.parametrize(("zero", "precision"), [(3, "fp32"), (1, "fp16")])
def test_overflow_changes_no_batch_statistics(zero: int, precision: str) -> None:
    engine = make_engine(zero, precision, has_norm=True)
    assert len(jax.tree.leaves(engine.state.model_state)) == 2
    check_overflow_is_skipped(engine, PLANTED[precision])


@pytest.mark.parametrize("planted", [np.inf, np.nan])
def test_batch_that_is_not_finite_changes_nothing(planted: float) -> None:
    check_overflow_is_skipped(shared_engine(2, "fp32"), planted)


def golden_scales(overflows: list[bool], scale: float, left: int) -> list[float]:
    """The scale that each step uses, by the rule of DeepSpeed's scaler."""
    scales = []
    for overflow in overflows:
        scales.append(scale)
        if overflow and left == 1:
            scale = max(scale / 2, 1.0)
        elif overflow:
            left -= 1
    return scales


def test_loss_scale_follows_the_golden_rule() -> None:
    engine = shared_engine(3, "fp16")
    state, scales = fresh(engine.state), []
    overflows = [bool(int(digit)) for digit in "0110101110"]
    for overflow in overflows:
        planted = PLANTED["fp16"] if overflow else None
        state, metrics = engine.train_step(state, make_batch(planted))
        scales.append(float(metrics["loss_scale"]))
    assert scales == golden_scales(overflows, 2.0**16, 2)
    assert scales[-1] == 2.0**11
    assert int(state.carried["loss_scale"].skipped) == sum(overflows)


def test_loss_scale_doubles_after_a_window_without_overflow() -> None:
    engine = shared_engine(3, "fp16")
    state = fresh(engine.state, hysteresis=1, iteration=1003, last_overflow=3)
    scales = []
    for _ in range(3):
        state, metrics = engine.train_step(state, make_batch())
        scales.append(float(metrics["loss_scale"]))
    assert scales == [2.0**16, 2.0**16, 2.0**17]
    assert int(state.carried["loss_scale"].hysteresis) == 2


def fresh(state: Any, **fields: float) -> Any:
    """A copy of a train state, its loss scaler as at the start but for `fields`."""
    start = {"scale": 2.0**16, "hysteresis": 2, "iteration": 0, "last_overflow": -1}
    start |= {"skipped": 0, "exhausted": False, **fields}
    old = state.carried["loss_scale"]
    scaler = dataclasses.replace(
        old,
        **{
            name: jax.device_put(
                np.asarray(value, getattr(old, name).dtype), old.scale.sharding
            )
            for name, value in start.items()
        },
    )
    return dataclasses.replace(
        jax.tree.map(jnp.copy, state), carried={"loss_scale": scaler}
    )


def test_overflow_at_the_least_scale_raises_and_can_be_restored_from(
    tmp_path: Path,
) -> None:
    engine = make_engine(3, "fp16")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, fresh(engine.state, scale=1.0, hysteresis=1))
    checkpoints.close()
    engine.restore(tmp_path)
    before, bad = bits_of(engine.state), make_batch(np.inf)
    assert float(engine.step(make_batch())["loss_scale"]) == 1.0
    engine.restore(tmp_path)
    for _ in range(2):
        engine.step(bad)
    with pytest.raises(FloatingPointError, match="its minimum of 1, so fp16 cannot"):
        engine.wait()
    engine.wait()  # Said once, so that a rollback may wait for its saves.
    assert bits_of(engine.state) == before
    engine.step(bad)
    with pytest.raises(FloatingPointError, match="precision='bf16'"):
        engine.save(tmp_path / "never")
    assert not (tmp_path / "never").exists()
    with pytest.raises(FloatingPointError, match="Lower the learning rate"):
        take_steps(engine, 4, bad)
    engine.restore(tmp_path)
    take_steps(engine, 3, make_batch())
    engine.wait()


def take_steps(engine: jaxpar.Engine, num: int, batch: dict) -> None:
    for _ in range(num):
        engine.step(batch)


@pytest.mark.parametrize(("zero", "precision"), [(1, "fp32"), (3, "fp16")])
def test_batch_of_no_weight_gives_loss_zero_and_is_skipped(
    zero: int, precision: str
) -> None:
    engine = shared_engine(zero, precision)
    before = bits_of(engine.state)
    step, skipped = (
        int(engine.state.step),
        int(engine.state.carried["loss_scale"].skipped),
    )
    scale = float(engine.state.carried["loss_scale"].scale)
    metrics = engine.step(make_batch() | {"w": np.zeros(ROWS, np.float32)})
    assert float(metrics["loss"]) == 0.0
    assert int(metrics["skipped"]) == skipped + 1
    assert float(engine.state.carried["loss_scale"].scale) == scale
    assert bits_of(engine.state) == before
    assert int(engine.state.step) == step + 1


@pytest.mark.parametrize("zero", [1, 2])
def test_shard_of_no_weight_takes_no_part(zero: int) -> None:
    engine = shared_engine(zero, "fp32")
    batch = make_batch() | {"w": np.repeat([1.0, 0.0, 2.0, 1.0], 4).astype(np.float32)}
    skipped = int(engine.state.carried["loss_scale"].skipped)
    output = np.asarray(engine.model()(batch["x"]))[:, 0]
    right = 0.01 * np.average((output - batch["y"]) ** 2, weights=batch["w"])
    metrics = engine.step(batch)
    assert float(metrics["loss"]) == pytest.approx(right, rel=1e-5)
    assert np.isfinite(metrics["grad_norm"])
    assert int(metrics["skipped"]) == skipped
