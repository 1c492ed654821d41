"""Does an engine say what it waits for, once, and about how long it compiles?"""

import io
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import jaxpar
from jaxpar import progress
from jaxpar.engine import compiling
from jaxpar.engine.step_program import OneJit

BATCH = {"x": np.ones((8, 4), np.float32)}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    said = io.StringIO()
    console = Console(file=said, force_terminal=False, soft_wrap=True)
    monkeypatch.setattr(progress, "_console", lambda: console)
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    return said


def lines_of(said: io.StringIO) -> list[str]:
    """What ended, in order."""
    return re.findall(r"^(.*): \d+ s$", said.getvalue(), re.MULTILINE)


@pytest.mark.usefixtures("checked_losses")
def test_engine_says_what_its_first_step_waits_for(said: io.StringIO) -> None:
    engine = jaxpar.initialize(
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        loss_fn=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        optimizer=optax.sgd(0.1),
        sample_batch=BATCH,
        mesh=jaxpar.MeshShape(data=4, tensor=2),
    )
    engine.step(BATCH)
    assert lines_of(said) == [
        "tracing the model",
        "initialising the state",
        "checking that loss_fn is a mean",
        "tracing the step",
        "compiling the step",
    ]
    line = r"^compiling the step, about \d+ s unless it is cached$"
    assert re.search(line, said.getvalue(), re.M)
    said.truncate(0)
    engine.step(BATCH)
    engine.step(BATCH)
    assert "compiling" not in said.getvalue()
    assert "tracing" not in said.getvalue()


def test_what_is_traced_and_lowered_for_the_estimate_is_what_is_called() -> None:
    traced = []

    def step(leaves: list, batch: Any) -> Any:
        traced.append(1)
        return [leaves[0] + batch["x"].sum()], {}, []

    program, leaves = OneJit(jax.jit(step, donate_argnums=0)), [jnp.ones(4)]
    with compiling.compiling(program, leaves, BATCH, platform="cpu"):
        program(leaves, BATCH)
    assert len(traced) == 1


def test_processes_but_the_first_say_nothing(
    said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, leaves = OneJit(jax.jit(lambda leaves, batch: (leaves, {}, []))), []
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with compiling.compiling(program, leaves, BATCH, platform="cpu"):
        pass
    assert said.getvalue() == ""


def test_no_time_is_said_where_none_is_known(said: io.StringIO) -> None:
    program, leaves = OneJit(jax.jit(lambda leaves, batch: (leaves, {}, []))), []
    with compiling.compiling(program, leaves, BATCH, platform="gpu"):
        pass
    assert lines_of(said) == ["tracing the step", "compiling the step"]
    assert "about" not in said.getvalue()
