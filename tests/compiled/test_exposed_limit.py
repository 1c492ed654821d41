"""Is a budget of exposed milliseconds refused where no schedule can be read?"""

import json
import math
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.compiled.budget import check, record
from jaxpar.compiled.exposed_limit import check_exposed_ms
from jaxpar.compiled.measured import Measured, join_measured
from jaxpar.compiled.source_lines import Operation
from jaxpar.mesh import MeshShape, make_mesh


def gather(line: str, milliseconds: float, times: int = 1) -> Operation:
    moved = ("all-gather", ("data",), "bf16[64,8]", 1, times, 1024, "dot", line)
    return Operation(*moved, exposed_seconds=milliseconds / 1e3)


def measured(*operations: Operation, exposed: float | None) -> Measured:
    return Measured({"data": 4}, (), operations, 0, False, True, exposed)


def test_what_is_exposed_beyond_the_budget_is_named_longest_first():
    waits = {"a": 1.0, "b": 4.0, "c": 2.0, "d": 0.5, "e": 2.5, "f": 1.5, "g": 3.0}
    operations = [gather(line, wait) for line, wait in waits.items()]
    step = measured(*operations, gather("c", 10.0, times=5), exposed=0.0245)
    budget = record(step)
    assert budget.exposed_ms is None
    assert not check(budget, step)
    assert not check(budget_of(step, 24.5), step)
    (said,) = check(budget_of(step, 15.0), step)
    first, *causes, remedy = said.splitlines()
    assert first == (
        "exposed: kernels wait 24.5 ms a step for collectives, by the compiled "
        "schedule at assumed rates, but the budget is 15 ms."
    )
    assert causes == [
        "  - 12.0 ms: 6 x all-gather of bf16[64,8], dot at c",
        "  - 4.0 ms: 1 x all-gather of bf16[64,8], dot at b",
        "  - 3.0 ms: 1 x all-gather of bf16[64,8], dot at g",
        "  - 2.5 ms: 1 x all-gather of bf16[64,8], dot at e",
        "  - 1.5 ms: 1 x all-gather of bf16[64,8], dot at f",
        "  - and 2 more, 1.5 ms",
    ]
    for part in ("zero=3", "accumulate=", "replica=", "exposed_ms="):
        assert part in remedy


def budget_of(step: Measured, exposed_ms: float) -> jaxpar.Budget:
    """Read from JSON, as users store it."""
    stored = json.loads(record(step).as_json()) | {"exposed_ms": exposed_ms}
    return jaxpar.Budget.from_json(json.dumps(stored))


def test_programs_of_one_step_expose_the_sum():
    parts = [measured(exposed=0.25), measured(exposed=0.5)]
    assert join_measured(parts).exposed_seconds == 0.75
    assert join_measured([*parts, measured(exposed=None)]).exposed_seconds is None


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_a_limit_must_be_a_number_of_milliseconds(wrong):
    mesh = make_mesh(MeshShape(-1), jax.devices())
    with pytest.raises(
        ValueError, match=re.escape(f"verify: exposed_ms={wrong!r} must be a number")
    ):
        check_exposed_ms(wrong, mesh)
    check_exposed_ms(None, mesh)


def test_cpus_are_refused_before_anything_is_compiled(monkeypatch):
    engine = jaxpar.initialize(
        model=lambda rngs: nnx.Linear(8, 8, rngs=rngs),
        loss_fn=lambda model, batch: (model(batch) ** 2).mean(),
        optimizer=optax.sgd(1e-3),
        sample_batch=jax.ShapeDtypeStruct((8, 8), np.float32),
        mesh=MeshShape(-1),
    )
    monkeypatch.setattr(engine, "lowered", lambda: pytest.fail("it was lowered"))
    with pytest.raises(
        ValueError,
        match=r"verify: exposed_ms=15\.0 needs a step compiled for GPUs whose rates "
        r"are known \(a100, b200, h100, h200\), .* 'cpu' devices",
    ):
        engine.verify(exposed_ms=15.0)
