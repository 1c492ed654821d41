"""What do steps of asynchronous schedules hold, run and say?"""

import warnings
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.jaxprs.evaluate import inner_jaxprs
from jaxpar.pipeline.schedules.asynchronous import PipeDream2BW, PipeMare
from tests.equivalence.delays import loss_fn, make_batches, make_model

ROWS = 16


def make_engine(schedule: Any, pipe: int = 2, **given: Any) -> jaxpar.Engine:
    shape = jaxpar.MeshShape(data=2, pipe=pipe)
    arguments = {"accumulate": 2, "optimizer": optax.adam(1e-3), **given}
    return jaxpar.initialize(
        model=make_model(4, tied=True, remat="none"),
        loss_fn=loss_fn,
        sample_batch=make_batches(ROWS, 1)[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
        schedule=schedule,
        **arguments,
    )


def scan_lengths(jaxpr: Any) -> set[int]:
    found: set[int] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            found.add(eqn.params["length"])
        for inner in inner_jaxprs(eqn).values():
            found |= scan_lengths(inner.jaxpr)
    return found


@pytest.mark.parametrize(
    ("schedule", "ticks"), [("1f1b", 14), ("pipedream_2bw", 8), (PipeMare(), 8)]
)
def test_step_has_as_many_ticks_as_micro_batches(schedule, ticks):
    engine = make_engine(schedule, pipe=4, accumulate=8)
    lengths = scan_lengths(engine.traces()["step"].jaxpr.jaxpr)
    # Those of one block a stage are the blocks' own loops.
    assert max(lengths) == ticks
    execution = engine.spec.execution
    assert (execution.bubble == 0.0) == (ticks == 8)
    assert execution.active_fraction == 8 / ticks


def test_first_steps_are_not_skipped_and_have_losses():
    engine = make_engine("pipedream_2bw")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = [engine.step(batch) for batch in make_batches(ROWS, 3)]
    assert all(np.isfinite(float(m["loss"])) for m in metrics)
    assert [int(m["skipped"]) for m in metrics] == [0, 0, 0]


@pytest.mark.thorough
def test_loss_that_is_not_there_yet_is_nan():
    engine = make_engine("pipemare", pipe=4, accumulate=1)
    losses = [float(engine.step(b)["loss"]) for b in make_batches(ROWS, 8)]
    assert np.isnan(losses[0])
    assert np.isfinite(losses[3:]).all()


def test_explain_says_what_is_under_way():
    said = str(make_engine(PipeDream2BW(), accumulate=4).explain())
    assert "4 ticks, without a bubble in the steady state" in said
    assert "of parameters 1 update old" in said
    assert "in_flight" in said
    assert "params_before" in said
    said = str(make_engine(PipeMare(), pipe=4).explain())
    assert "1.5 to 3 updates old" in said
    assert "a backward runs its blocks again" in said


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["pipedream_2bw", "pipemare"])
@pytest.mark.parametrize("zero", [0, 1])
def test_step_keeps_to_the_closed_form(schedule, zero):
    make_engine(schedule, zero=zero).verify()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zero": 2}, r"zero=2: schedule='pipedream_2bw'.*use zero=1"),
        ({"zero": 3}, r"zero=3: schedule='pipedream_2bw'.*use zero=1"),
        ({"precision": "fp16"}, r"precision='fp16'.*use precision='bf16'"),
        ({"accumulate": 1}, r"accumulate=1.*at least 2.*'pipemare'"),
        (
            {"optimizer": jaxpar.optim.onebit_adam(1e-3, freeze_step=2)},
            r"keeps something of every data shard",
        ),
        (
            {"offload": jaxpar.Offload(optimizer="host", update="host")},
            r"offload: schedule='pipedream_2bw'.*update='device'",
        ),
    ],
)
def test_what_is_not_defined_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        make_engine("pipedream_2bw", **given)


def test_pure_step_is_refused():
    engine = make_engine("pipedream_2bw")
    with pytest.raises(ValueError, match=r"asynchronous schedule.*engine\.step"):
        engine.train_step(engine.state, make_batches(ROWS, 1)[0])
