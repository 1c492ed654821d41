"""Are a step's rates those of its time, and its memory that of the process?"""

import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.compiled.hardware import load_hardware
from jaxpar.training import performance
from jaxpar.training.goodput import Clock
from jaxpar.training.performance import Performance
from tests.runs import fresh


class Spent:
    """A clock that is set."""

    def __init__(self):
        self.seconds = {"step": 1.0, "data": 0.5, "evaluate": 9.0}

    def spent(self, phase: str) -> float:
        return self.seconds[phase]


def test_numbers_are_of_the_time_since_the_last_step(monkeypatch):
    h100 = load_hardware("h100")
    monkeypatch.setattr(performance, "hardware_of", lambda _: h100)
    monkeypatch.setattr(performance, "memory_bytes", lambda: 3_000_000_000)
    engine, clock = fresh(), Spent()
    measured = Performance(engine, clock.spent, 1000)
    clock.seconds = {"step": 2.5, "data": 1.0, "evaluate": 99.0}
    flops = 3 * engine.spec.forward_flops / 2.0
    assert measured.read() == {
        "perf/step_seconds": 2.0,
        "perf/data_seconds": 0.5,
        "perf/memory_gb": 3.0,
        "perf/tokens_per_second": 500.0,
        "perf/mfu": pytest.approx(
            flops / (engine.mesh.devices.size * h100.peak["float32"])
        ),
    }
    assert measured.read()["perf/step_seconds"] == 0.0
    assert "perf/tokens_per_second" not in measured.read()


def test_step_after_a_rollback_takes_no_time_back(tmp_path: Path):
    """The clock moves what is lost from the steps to a kind of its own."""
    clock = Clock(tmp_path)
    clock.resume(0)
    measured = Performance(fresh(), clock.spent, None)
    for step in (1, 2, 3):
        clock.enter("step", step)
        time.sleep(0.02)
        measured.read()
    clock.resume(0)
    measured.read()
    clock.enter("step", 1)
    time.sleep(0.01)
    assert 0.01 <= measured.read()["perf/step_seconds"] < 0.05


def test_cpu_has_no_peak_and_the_memory_of_the_process(tmp_path: Path):
    found = Performance(fresh(), Clock(tmp_path).spent, None).read()
    assert set(found) == {"perf/step_seconds", "perf/data_seconds", "perf/memory_gb"}
    assert 0.05 < found["perf/memory_gb"] < 50


def test_device_says_its_own_peak_of_memory(monkeypatch):
    devices = [
        types.SimpleNamespace(memory_stats=lambda n=n: {"peak_bytes_in_use": n})
        for n in (5, 7)
    ]
    monkeypatch.setattr(performance.jax, "local_devices", lambda: devices)
    assert performance.memory_bytes() == 7


def test_tokens_are_those_of_the_steps_own_batch(monkeypatch):
    monkeypatch.setattr(performance, "hardware_of", lambda _: load_hardware("h100"))
    half, whole = ({"x": np.ones((rows, 4), np.float32)} for rows in (8, 16))
    engine = jaxpar.initialize(
        model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
        loss_fn=lambda model, batch: jnp.mean(model(batch["x"])),
        optimizer=optax.sgd(0.1),
        sample_batch=whole,
        other_shapes=[half],
        mesh=jaxpar.MeshShape(data=2),
        devices=jax.devices()[:2],
    )
    clock, found = Spent(), []
    measured = Performance(engine, clock.spent, 1000)
    for batch in (whole, half):
        clock.seconds["step"] += 1.0
        found.append(measured.read(batch))
    rates = [own["perf/tokens_per_second"] for own in found]
    assert rates == [1000.0, 500.0]
    assert found[0]["perf/mfu"] == pytest.approx(2 * found[1]["perf/mfu"])
