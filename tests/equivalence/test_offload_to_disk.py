"""Does a state on disk train as one in memory, on any mesh, and outlive its process?

To the bit as the same update of the same state in host memory, which
tests/equivalence/test_offload.py compares with the plain step.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from tests.equivalence import killed_run
from tests.equivalence.perceptron import batches, make_engine, make_piped_engine

HOST = jaxpar.Offload(piece_mb=0.0002, update="host")
ADAM = optax.adamw(1e-2)
OPTIMIZERS: dict[str, Any] = {
    "adamw": ADAM,
    "lion": optax.lion(1e-3),
    "chained": optax.chain(optax.clip_by_global_norm(0.3), optax.adam(1e-2)),
    "bf16 moments": optax.adam(1e-2, mu_dtype="bfloat16"),
}
BOTH = {"accumulate": 2, "clip_norm": 0.5}
pytestmark = pytest.mark.filterwarnings(
    "ignore::jaxpar.engine.run_ahead.SkippedStepWarning"
)


def disk(folder: Path, **options: Any) -> jaxpar.Offload:
    given = {"optimizer": "disk", "piece_mb": 0.0002, **options}
    return jaxpar.Offload(path=str(folder), **given)


def state_of(engine: jaxpar.Engine) -> dict:
    state = engine.state
    return jax.device_get((state.params, state.opt_state, state.carried))


def trained(engine: jaxpar.Engine) -> tuple[list[float], Any]:
    losses = [float(engine.step(batch)["loss"]) for batch in batches()]
    return losses, state_of(engine)


def assert_alike(engines: Iterable[jaxpar.Engine]) -> None:
    """Two engines train alike to the bit, from the first one's initial parameters.

    In half precision, a program that makes the copies too rounds some of the initial
    values the other way.
    """
    one, other = engines
    other.load_params(jax.device_get(one.state.params))
    found, right = trained(one), trained(other)
    assert found[0] == right[0]
    assert_equal(found[1], right[1])


def assert_equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
    ("name", "zero", "options"),
    [
        ("adamw", 3, BOTH),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                ("lion", 3, {}),
                ("chained", 3, {}),
                ("bf16 moments", 3, {"precision": "bf16"}),
                ("adamw", 2, {"precision": "fp16"}),
                ("adamw", 1, {"precision": "bf16"}),
                ("adamw", 0, {}),
            ]
        ),
    ],
)
def test_trains_as_the_state_in_memory(name, zero, options, tmp_path) -> None:
    assert_alike(
        make_engine(OPTIMIZERS[name], 4, 2, zero, offload=offload, **options)
        for offload in (disk(tmp_path), HOST)
    )


@pytest.mark.thorough
def test_trains_in_a_pipeline(tmp_path: Path) -> None:
    assert_alike(
        make_piped_engine(ADAM, offload=offload) for offload in (disk(tmp_path), HOST)
    )


@pytest.mark.thorough
def test_a_part_of_the_state_may_stay_on_the_device(tmp_path: Path) -> None:
    half = make_engine(ADAM, 4, 2, 3, offload=disk(tmp_path, fraction=0.5))
    whole = make_engine(ADAM, 4, 2, 3)
    assert 0 < len(half.placement.update.host_leaves) < 4
    np.testing.assert_allclose(trained(half)[0], trained(whole)[0], rtol=1e-6)


def test_a_skipped_step_leaves_the_state(tmp_path: Path) -> None:
    engine = make_engine(ADAM, 4, 2, 3, offload=disk(tmp_path))
    engine.step(batches()[0])
    before = state_of(engine)
    bad = {name: np.full_like(x, np.nan) for name, x in batches()[0].items()}
    engine.step(bad)
    assert_equal(state_of(engine)[:2], before[:2])
    del engine
    engine = make_engine(ADAM, 4, 2, 3, offload=disk(tmp_path))
    assert engine.resume() == 2
    assert_equal(state_of(engine)[:2], before[:2])


def test_checkpoints_move_between_device_host_and_disk(tmp_path: Path) -> None:
    settings = [None, HOST, disk(tmp_path / "a"), None]
    state = None
    for number, offload in enumerate(settings):
        engine = make_engine(ADAM, 4, 2, 3, offload=offload)
        if number:
            assert engine.restore(tmp_path / "checkpoints") == number
            assert_equal(state_of(engine), state)
        engine.step(batches()[number])
        engine.save(tmp_path / "checkpoints")
        engine.wait()
        state = state_of(engine)


def test_resumes_at_the_last_step_to_the_bit(tmp_path: Path) -> None:
    engine = make_engine(ADAM, 4, 2, 3, offload=disk(tmp_path), precision="bf16")
    other = make_engine(ADAM, 4, 2, 3, offload=HOST, precision="bf16")
    other.load_params(jax.device_get(engine.state.params))
    right = trained(other)
    assert engine.resume() == 0
    losses = [float(engine.step(batch)["loss"]) for batch in batches()[:2]]
    del engine
    engine = make_engine(ADAM, 4, 2, 3, offload=disk(tmp_path), precision="bf16")
    with pytest.raises(ValueError, match=r"has step 2 of an earlier run.*resume"):
        engine.step(batches()[0])
    data = iter(batches())
    assert engine.resume(data=data) == 2 == engine.steps
    losses += [float(engine.step(batch)["loss"]) for batch in data]
    assert losses == right[0]
    assert_equal(state_of(engine), right[1])


@pytest.mark.parametrize(
    "kills", [2, pytest.param(100, marks=pytest.mark.slow)], ids=str
)
def test_a_killed_process_loses_no_whole_step(kills: int, tmp_path: Path) -> None:
    """Killed at random moments, most while a step is written."""
    wait, step = random.Random(kills), 0
    for number in range(kills):
        process = started(tmp_path, stdout=subprocess.PIPE)
        assert process.stdout is not None
        resumed = process.stdout.readline().split()
        assert resumed[0] == "resumed", resumed
        # The last step may have been whole before it was said.
        assert step <= int(resumed[1]) <= step + 1
        step = int(resumed[1])
        if number % 3 != 1:  # The first step compiles.
            step = int(process.stdout.readline().split()[1])
        time.sleep(wait.random() * killed_run.SECONDS)
        process.kill()
        said, _ = process.communicate()
        step = max([step, *(int(line.split()[1]) for line in said.split("\n")[:-1])])
    engine = killed_run.on_disk(tmp_path)
    taken = engine.resume()
    assert taken >= step > 0
    assert started(tmp_path, str(taken)).wait() == 0
    right = np.load(tmp_path / "right.npz")
    for found, name in zip(killed_run.leaves_of(engine), right.files, strict=True):
        np.testing.assert_array_equal(found, right[name])


def started(folder: Path, *args: str, **options: Any) -> subprocess.Popen[str]:
    env = {
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", killed_run.__name__, str(folder), *args]
    return subprocess.Popen(command, env=os.environ | env, text=True, **options)
