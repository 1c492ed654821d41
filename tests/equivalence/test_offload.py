"""Does a state in host memory train as one on the device, on any mesh?

To the bit as the same update with its pieces on the device; and as the plain step, to
design's tolerances: losses 1e-6 and parameters 1e-5, relative, over six steps.
"""

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.offload import cpu_update, streamed_optimizer
from jaxpar.optim import fused_adamw, fused_lion
from tests.equivalence.perceptron import batches, make_engine, make_piped_engine
from tests.equivalence.problems import distance

OFFLOAD = jaxpar.Offload(piece_mb=0.0002)
"""Pieces of 50 elements."""

ADAM = optax.adamw(1e-2)
OPTIMIZERS: dict[str, Any] = {
    "adamw": ADAM,
    "sgd": optax.sgd(0.05, momentum=0.9),
    "chained": optax.chain(optax.clip_by_global_norm(0.3), optax.lion(1e-3)),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-2),
    "fused": fused_adamw(1e-2),
    "fused lion": fused_lion(1e-3),
    "bf16 moments": optax.adam(1e-2, mu_dtype="bfloat16"),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-2),
    "adan": optax.adan(1e-2),
    "every 2": optax.MultiSteps(ADAM, 2).gradient_transformation(),
}
pytestmark = pytest.mark.filterwarnings(
    "ignore::jaxpar.engine.run_ahead.SkippedStepWarning"
)
QUICK = ("adamw", "chained", "lamb")
QUICK_ON_HOST: list = [("adamw", 3, {"accumulate": 2, "clip_norm": 0.5})]
QUICK_ON_HOST += [("chained", 3, {}), ("lamb", 3, {})]


def trained(engine: jaxpar.Engine) -> tuple[list[float], dict]:
    losses = [float(engine.step(batch)["loss"]) for batch in batches()]
    return losses, jax.device_get((engine.state.params, engine.state.opt_state))


def kinds(engine: jaxpar.Engine) -> set[str]:
    leaves = jax.tree.leaves((engine.state.params, engine.state.opt_state))
    return {leaf.sharding.memory_kind for leaf in leaves if leaf.size > 8}


def equal(one: Any, other: Any) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


@functools.cache
def plain(name: str, zero: int, **options: Any) -> tuple[list[float], dict]:
    return trained(make_engine(OPTIMIZERS[name], 4, 2, zero, **options))


def assert_alike(found: tuple, right: tuple) -> None:
    np.testing.assert_allclose(found[0], right[0], rtol=1e-6)
    assert distance(found[1][0], right[1][0]) <= 1e-5


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        pytest.param(
            name,
            zero,
            marks=() if name in QUICK and zero == 3 else pytest.mark.thorough,
        )
        for name, zero in [
            *((name, 3) for name in OPTIMIZERS),
            *(("adamw", zero) for zero in (0, 1, 2)),
        ]
    ],
)
def test_trains_as_the_plain_step(name: str, zero: int) -> None:
    engine = make_engine(OPTIMIZERS[name], 4, 2, zero, offload=OFFLOAD)
    assert_alike(trained(engine), plain(name, zero))
    assert "pinned_host" in kinds(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2, "clip_norm": 0.5},
        pytest.param({"precision": "bf16"}, marks=pytest.mark.thorough),
        pytest.param({"precision": "fp16"}, marks=pytest.mark.thorough),
    ],
    ids=["accumulated", "bf16", "fp16"],
)
def test_to_the_bit_as_the_same_pieces_on_the_device(options: dict) -> None:
    there = make_engine(ADAM, 4, 2, 1, offload=OFFLOAD, **options)
    real = streamed_optimizer.StreamedUpdate
    here_too = functools.partial(real, memory_kind="device")
    with mock.patch.object(streamed_optimizer, "StreamedUpdate", here_too):
        here = make_engine(ADAM, 4, 2, 1, offload=OFFLOAD, **options)
    found, right = trained(there), trained(here)
    assert found[0] == right[0]
    assert equal(found[1], right[1])
    assert kinds(there) == {"pinned_host"}
    assert kinds(here) == {"device"}


@pytest.mark.thorough
@pytest.mark.parametrize("update", ["device", "host"])
def test_trains_alike_on_a_pipe(update: str) -> None:
    offload = dataclasses.replace(OFFLOAD, update=update)
    found, right = (
        trained(make_piped_engine(ADAM, **options))
        for options in ({"offload": offload}, {})
    )
    assert_alike(found, right)


@pytest.mark.parametrize(
    ("name", "zero", "options"),
    [
        pytest.param(*case, marks=() if case in QUICK_ON_HOST else pytest.mark.thorough)
        for case in [
            *(("adamw", zero, {}) for zero in (0, 1, 2)),
            *((name, 3, {}) for name in OPTIMIZERS),
            ("adamw", 3, {"accumulate": 2, "clip_norm": 0.5}),
        ]
    ],
    ids=str,
)
def test_the_host_computes_the_update(name: str, zero: int, options: dict) -> None:
    offload = dataclasses.replace(OFFLOAD, update="host")
    engine = make_engine(OPTIMIZERS[name], 4, 2, zero, offload=offload, **options)
    assert_alike(trained(engine), plain(name, zero, **options))
    assert "pinned_host" in kinds(engine)
    computes = name not in ("lamb", "adafactor", "every 2")
    lines = [line for line in engine.explain().notes if "the host computes" in line]
    assert bool(lines) == computes
    assert not computes or "compiled C code" in lines[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("way", ["C", "XLA", "in place"])
def test_the_host_computes_as_the_device_does(way: str, precision: str) -> None:
    """Each way, from one initial state; a step that is skipped is among them."""
    offload = dataclasses.replace(OFFLOAD, update="host")
    kind = streamed_optimizer.CpuUpdate
    wrong = {name: np.full_like(x, np.inf) for name, x in batches()[0].items()}
    with contextlib.ExitStack() as changed:
        if way == "in place":
            made = functools.partial(kind, in_place=True)
            where = mock.patch.object(streamed_optimizer, "CpuUpdate", made)
            changed.enter_context(where)
        if way == "XLA":
            failing = mock.patch.object(cpu_update, "compiled", side_effect=OSError)
            changed.enter_context(failing)
        engines = [
            make_engine(ADAM, 4, 2, 1, offload=each, precision=precision)
            for each in (offload, OFFLOAD)
        ]
        for batch in (*batches()[:2], wrong, *batches()[2:]):
            found, right = (float(each.step(batch)["loss"]) for each in engines)
            assert found == pytest.approx(right, rel=2e-6, nan_ok=True)
        states = [jax.device_get((e.state.params, e.state.opt_state)) for e in engines]
    # In half precision one rounding of a parameter is 5e-4 of its gradients.
    assert distance(states[0][0], states[1][0]) <= 1e-5
    most = 1e-5 if precision == "fp32" else 1e-3
    assert distance(states[0][1], states[1][1]) <= most
    assert [int(e.state.carried["loss_scale"].skipped) for e in engines] == [1, 1]


def test_a_state_that_was_read_does_not_change() -> None:
    """NumPy's view of it, which the CPU platform makes without a copy."""
    offload = dataclasses.replace(OFFLOAD, update="host")
    engine = make_engine(ADAM, 4, 2, 1, offload=offload)
    before = jax.device_get((engine.state.params, engine.state.opt_state))
    copied = jax.tree.map(np.copy, before)
    engine.step(batches()[0])
    assert equal(before, copied)
    after = jax.device_get((engine.state.params, engine.state.opt_state))
    assert not equal(before, after)


def test_a_part_stays_on_the_device() -> None:
    half = dataclasses.replace(OFFLOAD, fraction=0.6)
    engine = make_engine(ADAM, 4, 2, 3, offload=half)
    assert_alike(trained(engine), plain("adamw", 3))
    assert kinds(engine) == {"device", "pinned_host"}
    report = engine.explain()
    assert 0 < report.host_bytes_per_device < report.bytes_per_device * 4


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, OFFLOAD),
        pytest.param(OFFLOAD, None, marks=pytest.mark.thorough),
    ],
    ids=["to the host", "to the device"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_moves_between_the_two(before, after, precision, tmp_path: Path) -> None:
    first = make_engine(ADAM, 4, 2, 3, offload=before, precision=precision)
    for batch in batches()[:3]:
        first.step(batch)
    first.save(tmp_path)
    first.wait()
    second = make_engine(ADAM, 8, 1, 1, offload=after, precision=precision)
    second.restore(tmp_path)
    assert equal(*(jax.device_get(e.state.params) for e in (first, second)))
    losses = [float(second.step(batch)["loss"]) for batch in batches()[3:]]
    right = plain("adamw", 3, precision=precision)[0][3:]
    tolerance = 1e-6 if precision == "fp32" else 1e-4  # Sums over another mesh in bf16.
    np.testing.assert_allclose(losses, right, rtol=tolerance)


def test_a_skipped_step_changes_nothing() -> None:
    engine = make_engine(ADAM, 4, 2, 1, offload=OFFLOAD)
    engine.step(batches()[0])
    before = jax.device_get((engine.state.params, engine.state.opt_state))
    wrong = {name: np.full_like(x, np.inf) for name, x in batches()[0].items()}
    assert int(engine.step(wrong)["skipped"]) == 1
    assert equal(before, jax.device_get((engine.state.params, engine.state.opt_state)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tools_see_the_host(precision: str) -> None:
    engine = make_engine(ADAM, 4, 2, 1, offload=OFFLOAD, precision=precision)
    whole = make_engine(ADAM, 4, 2, 1, precision=precision)
    budget, right = engine.verify(), whole.verify()
    copies = jax.tree.leaves(engine._packed.params["copies"])
    assert bool(copies) == (precision == "bf16")
    copies = sum(x.addressable_shards[0].data.nbytes for x in copies)
    total = budget.state_bytes + budget.host_state_bytes
    assert total - copies == right.state_bytes
    assert budget.communicated == right.communicated
    assert "the model has 1,608 parameters" in str(engine.explain())
    engine.probe()
    own = [engine.evaluate(batches()[0])["loss"] for _ in range(2)]
    assert own[0] == own[1] == whole.evaluate(batches()[0])["loss"]


class Tanh(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.linear(x))


def two_losses(precision: str, offload: jaxpar.Offload | None) -> tuple[list, Any]:
    """Of two models; the second loss reads both."""
    x = batches()[0]["x"]
    engine = jaxpar.initialize(
        model={"a": lambda rngs: Tanh(rngs), "b": lambda rngs: Tanh(rngs)},
        loss_fn={
            "a": lambda models, x: jnp.mean((models["a"](x) - 1) ** 2),
            "b": lambda models, x: jnp.mean((models["b"](models["a"](x)) - x) ** 2),
        },
        optimizer=ADAM,
        sample_batch={"a": x, "b": x},
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=4), jax.devices()[:4]),
        zero=2,
        precision=precision,
        offload=offload,
    )
    steps = [engine.step(x, loss=n)["loss"] for _ in range(3) for n in ("a", "b")]
    steps.append(engine.evaluate(x, loss="b")["loss"])
    return [float(loss) for loss in steps], engine


@pytest.mark.usefixtures("checked_losses")
@pytest.mark.parametrize(
    "precision", ["fp32", pytest.param("bf16", marks=pytest.mark.thorough)]
)
def test_a_loss_reads_a_model_that_another_one_keeps_on_the_host(precision) -> None:
    losses, engine = two_losses(precision, OFFLOAD)
    assert kinds(engine) == {"pinned_host"}
    tolerance = 1e-6 if precision == "fp32" else 1e-3
    right, _ = two_losses(precision, None)
    np.testing.assert_allclose(losses, right, rtol=tolerance)


def test_the_model_that_was_trained_can_be_called() -> None:
    engine = make_engine(ADAM, 4, 2, 1, offload=OFFLOAD)
    engine.step(batches()[0])
    model = engine.model()
    assert model.up.kernel[...].sharding.memory_kind == "device"
    found = model(batches()[1]["x"])
    loss = np.mean((np.asarray(found) - batches()[1]["y"]) ** 2)
    assert loss == pytest.approx(float(engine.evaluate(batches()[1])["loss"]), rel=1e-6)


@pytest.mark.thorough
def test_an_average_of_the_parameters_is_kept() -> None:
    carried = [jaxpar.Ema(0.9)]
    found, right = (
        make_engine(ADAM, 4, 2, 1, carried=carried, offload=offload)
        for offload in (OFFLOAD, None)
    )
    for batch in batches():
        found.step(batch)
        right.step(batch)
    one, other = (jax.device_get(e.state.carried["ema"]) for e in (found, right))
    assert distance(one, other) <= 1e-5
