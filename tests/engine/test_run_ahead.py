"""Does the host wait for the devices often enough, and see what they report?"""

import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.engine.run_ahead import AHEAD, Dispatched, RunAhead, SkippedStepWarning

ROOT = Path(__file__).resolve().parents[2]


class Output:
    """What `jax.block_until_ready` asks of an array."""

    def __init__(self, error: Exception | None = None):
        self.is_waited_for, self.error = False, error

    def block_until_ready(self) -> "Output":
        self.is_waited_for = True
        if self.error:
            raise self.error
        return self


@pytest.mark.usefixtures("unchecked_types")
def test_the_oldest_program_is_waited_for_when_there_are_more_than_the_bound() -> None:
    ahead, outputs = RunAhead(), [Output() for _ in range(AHEAD + 2)]
    for number, output in enumerate(outputs):
        ahead.add(Dispatched(f"step {number}", output))
    assert [x.is_waited_for for x in outputs] == [True] * 2 + [False] * AHEAD
    ahead.finish()
    assert all(x.is_waited_for for x in outputs)


@pytest.mark.usefixtures("unchecked_types")
def test_a_program_that_failed_is_named() -> None:
    ahead = RunAhead(bound=0)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        ahead.add(Dispatched("step 7", Output(jax.errors.JaxRuntimeError("no room"))))
    assert caught.value.__notes__ == ["Raised by step 7, which was dispatched earlier."]


def test_skipped_steps_are_reported_at_powers_of_two() -> None:
    found = []
    ahead = RunAhead({None: 3}, bound=0)
    for step in range(1, 12):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            skipped = jnp.int32(3 + max(0, step - 2))
            ahead.add(Dispatched(f"step {step}", skipped, skipped))
        found += [step for warning in caught]
        assert all(w.category is SkippedStepWarning for w in caught)
    assert found == [3, 4, 6, 10]


def test_batches_of_nan_warn_in_a_plain_loop() -> None:
    def loss_fn(model, batch):
        return jnp.mean(model(batch["x"]) ** 2)

    batch = {"x": np.ones((8, 4), np.float32)}
    engine = jaxpar.initialize(
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.1),
        sample_batch=batch,
    )
    engine.step(batch)
    bad = {"x": np.full((8, 4), np.nan, np.float32)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SkippedStepWarning)
        for _ in range(3):
            engine.step(bad)
        engine.wait()
    said = [str(warning.message) for warning in caught]
    assert [text.split(":")[0] for text in said] == [
        "step 2 was skipped (1 so far)",
        "step 3 was skipped (2 so far)",
    ]
    assert "Look for NaN or infinity in the batch" in said[0]


def said(loop: str, *numbers: int) -> str:
    """What a loop of this folder prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.engine.{loop}", *map(str, numbers)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("zero", "devices"),
    [
        (0, 8),
        pytest.param(1, 8, marks=pytest.mark.slow),
        pytest.param(2, 8, marks=pytest.mark.slow),
        pytest.param(3, 8, marks=pytest.mark.slow),
        pytest.param(3, 32, marks=pytest.mark.slow),
    ],
)
def test_a_loop_that_reads_no_number_ends(zero: int, devices: int) -> None:
    assert said("endless_loop", zero, devices).startswith("400 steps, loss 0.")


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(("zero", "devices"), [(0, 8), (1, 32), (3, 32)])
def test_steps_evaluations_probes_and_saves_keep_the_bound(
    zero: int, devices: int
) -> None:
    """Together, in any order, on more devices than XLA:CPU runs programs at once."""
    assert said("busy_loop", zero, devices, 7).startswith("300 calls, loss 0.")
