"""Are a step's rates those of its time, and its memory that of the process?"""

import time
import types
from pathlib import Path

import pytest

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
