"""Is the faster of both updates taken, and said?"""

from typing import Any

import optax
import pytest

import jaxpar
from jaxpar.mesh import compile_only
from jaxpar.offload import choose_update, streamed_optimizer
from jaxpar.offload.choose_update import UpdateTimes, measure_update
from jaxpar.offload.cpu_update import CpuUpdate
from jaxpar.offload.streamed_update import StreamedUpdate
from tests.equivalence.perceptron import batches, make_engine

AUTO = jaxpar.Offload(update="auto", piece_mb=0.0002)


@pytest.mark.parametrize(
    ("times", "kind", "said"),
    [
        (
            UpdateTimes(1.0, 0.5),
            CpuUpdate,
            "update='auto' is 'host': 500.0 ms a step",
        ),
        (UpdateTimes(0.5, 1.0), StreamedUpdate, "and 1,000.0 by the host, as measured"),
    ],
)
def test_the_faster_one_is_taken(times, kind, said, monkeypatch, capsys) -> None:
    monkeypatch.setattr(streamed_optimizer, "measure_update", lambda _: times)
    engine = make_engine(optax.adam(1e-2), 2, 1, 3, offload=AUTO)
    assert type(engine.placement.update) is kind
    assert said in capsys.readouterr().err
    assert any(said in line for line in engine.explain().notes)
    engine.step(batches()[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_are_measured_here(precision: str, monkeypatch) -> None:
    monkeypatch.setattr(choose_update, "_ELEMENTS", 1 << 16)
    given: dict[str, Any] = {"offload": jaxpar.Offload(update="host", piece_mb=0.0002)}
    engine = make_engine(optax.adam(1e-2), 2, 1, 3, precision=precision, **given)
    times = measure_update(engine.placement.update)
    assert 0 < times.device < 10
    assert 0 < times.host < 10


def test_devices_that_are_not_here_are_not_measured() -> None:
    with compile_only(), pytest.raises(ValueError, match="which are not here; plan"):
        make_engine(optax.adam(1e-2), 2, 1, 3, offload=AUTO)
