"""Does a run that is killed at any moment go on, and end as if it never had been?"""

import json
import multiprocessing
import random
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar.checkpoint import folder as files
from jaxpar.training.metrics import read_metrics
from tests.runs import Data, bits, fresh, go, run_in

SAVE_EVERY = 4
START_SECONDS, TRAIN_SECONDS = 120.0, 1.0
ENDLESS = 10**6


def keep_training(folder: Path, cache: str, steps: int) -> None:
    """What a process that is killed does."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    go(fresh(), Data(), folder, steps=steps, save_every=SAVE_EVERY)


def start(folder: Path, steps: int) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.runs"])
    cache = jax.config.jax_compilation_cache_dir
    process = context.Process(target=keep_training, args=(folder, cache, steps))
    process.start()
    return process


def logged(folder: Path) -> int:
    """The last step that a run has told of."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    whole = [line for line in lines if line.endswith("}")]
    return json.loads(whole[-1])["step"] if whole else 0


def wait_for_a_step_after(folder: Path, step: int, process: BaseProcess) -> None:
    for _ in range(int(START_SECONDS / 0.02)):
        if (folder / "metrics.jsonl").exists() and logged(folder) > step:
            return
        process.join(0.02)
        assert process.exitcode is None, "it trains until it is killed"
    pytest.fail("it did not begin to train")


def kill_inside_a_save(process: BaseProcess, checkpoints: Path) -> bool:
    """Kill while a save is under way; whether one was seen."""
    for _ in range(5000):
        if any(checkpoints.glob(f"*{files.SAVING}*")):
            process.kill()
            return True
        process.join(0.0005)
    process.kill()
    return False


def of_the_model(record: dict[str, Any]) -> dict[str, Any]:
    """Without the times of a step and the memory, which are the machine's."""
    return {k: v for k, v in record.items() if k != "time" and "perf/" not in k}


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_run_recovers_every_time_and_loses_nothing(
    kills: int, tmp_path: Path
) -> None:
    rng, folder = random.Random(kills), tmp_path / "killed"
    checkpoints = folder / "checkpoints"
    newest = inside = 0
    for number in range(kills):
        process = start(folder, ENDLESS)
        wait_for_a_step_after(folder, newest + rng.randrange(3 * SAVE_EVERY), process)
        if number % 2:
            process.join(rng.random() * TRAIN_SECONDS)
            process.kill()
        else:
            inside += kill_inside_a_save(process, checkpoints)
        process.join()
        told = logged(folder)
        found = files.choose(checkpoints, None)
        assert not found["skipped"], "what bears a step's name is whole"
        # A step is logged before it is saved: the next one's line tells that it began.
        begun = max(0, told - 1) // SAVE_EVERY * SAVE_EVERY
        assert found["step"] >= max(newest, begun - SAVE_EVERY)
        newest = found["step"]
    assert inside >= kills // 3
    last, ended = newest + 7, []
    for path in (folder, tmp_path / "whole"):
        process = start(path, last)
        process.join()
        assert process.exitcode == 0
        engine = fresh()
        assert run_in(path).resume(engine) == last
        ended.append(bits(engine))
    assert ended[0] == ended[1]
    for one, other in zip(
        read_metrics(folder / "metrics.jsonl"),
        read_metrics(tmp_path / "whole" / "metrics.jsonl"),
        strict=True,
    ):
        assert of_the_model(one) == of_the_model(other)
    assert not [p.name for p in checkpoints.iterdir() if "." in p.name]


def test_every_prefix_of_a_save_is_no_step(tmp_path: Path) -> None:
    """Whatever a killed save leaves bears another name until it is whole."""
    go(fresh(), Data(), tmp_path, steps=2, save_every=2)
    step = files.step_path(tmp_path / "checkpoints", 2)
    names = sorted(p.relative_to(step) for p in step.rglob("*") if p.is_file())
    for count in range(len(names)):
        part = files.saving_path(tmp_path / "checkpoints", 9)
        for name in names[:count]:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_bytes((step / name).read_bytes())
        assert files.choose(tmp_path / "checkpoints", None)["step"] == 2
    assert run_in(tmp_path).resume(fresh()) == 2
