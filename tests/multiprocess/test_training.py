"""Do two processes of two devices train like one process of four?

Real processes with gloo between them, started twice for all tests here. Losses of four
steps, gradient norms and a held-out loss to 1e-6 relative: the same program on the same
mesh, its sums over other wires.
"""

import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.multiprocess.launching import ROOT, environment
from tests.multiprocess.worker import BATCH, Case, run

LIMIT_SECONDS = 240
PROCESSES, DEVICES = 2, 2
# Over tensor 4, which crosses processes, the first run's checkpoint goes on.
CASES = {
    "data4": Case(data=4, tensor=1, zero=2, accumulate=2, save="first"),
    "data2-tensor2": Case(data=2, tensor=2, zero=3),
    "tensor4": Case(data=1, tensor=4, zero=1, restore="first"),
    "disk": Case(data=2, tensor=2, zero=3, disk="disk"),
}

OTHERS = ("data2-tensor2", "tensor4", "disk", "from one")

pytestmark = pytest.mark.multiprocess


def in_folder(case: Case, folder: Path) -> Case:
    places = {"save": case.save, "restore": case.restore}
    places["disk"] = case.disk
    full = {name: str(folder / path) for name, path in places.items() if path}
    return dataclasses.replace(case, **full)


def launch(
    cases: Sequence[Case],
    folder: Path,
    worker: str = "tests.multiprocess.worker",
    devices: int = DEVICES,
) -> list[list[dict[str, Any]]]:
    """Run the workers to their end; what each of them saw, case by case."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    spec = {
        "coordinator": coordinator,
        "count": PROCESSES,
        "devices": devices,
        "cases": [dataclasses.asdict(case) for case in cases],
    }
    started: list[subprocess.Popen] = []
    try:
        for index in range(PROCESSES):
            out = str(folder / f"{index}.json")
            text = json.dumps(spec | {"index": index})
            with (folder / f"{index}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", worker, text, out],
                        cwd=ROOT,
                        env=environment(),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        # A group of its own, so that its children end with it.
                        start_new_session=True,
                    )
                )
        codes = wait_for(started)
    finally:
        for process in started:
            end(process)
    logs = "\n".join(
        f"-- process {index}:\n{(folder / f'{index}.log').read_text()[-6000:]}"
        for index in range(PROCESSES)
    )
    assert codes == [0] * PROCESSES, f"exit codes {codes} (None: too slow)\n{logs}"
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(PROCESSES)]


def wait_for(processes: Sequence[subprocess.Popen]) -> list[int | None]:
    """Exit codes when all have ended well, one badly, or the time is over."""
    until = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return codes
        running = next(p for p in processes if p.poll() is None)
        try:
            running.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            continue
    return [process.poll() for process in processes]


def end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)


@dataclasses.dataclass(frozen=True)
class Both:
    """Runs of two processes, and the folder that they write to."""

    folder: Path
    alone: Path

    def seen(self, name: str) -> list[dict[str, Any]]:
        """What each process saw of a case."""
        # The first saves what others restore, and is all that `make test` needs.
        first = self._run(("data4",))
        return first[name] if name in first else self._run(OTHERS)[name]

    @functools.cache  # noqa: B019 - as long as the module's fixture
    def _run(self, names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
        cases = {name: in_folder(case, self.folder) for name, case in CASES.items()}
        restore = str(self.alone / "first")
        cases["from one"] = dataclasses.replace(CASES["tensor4"], restore=restore)
        results = launch([cases[name] for name in names], self.folder)
        return {name: [own[i] for own in results] for i, name in enumerate(names)}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of one process write."""
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, one: Path, run_alone: Any) -> Both:
    run_alone("data4")
    return Both(tmp_path_factory.mktemp("two"), one)


@pytest.fixture(scope="module")
def run_alone(one: Path) -> Any:
    @functools.cache
    def alone(name: str) -> dict[str, Any]:
        case = CASES[name]
        if case.restore and not (one / case.restore).exists():
            alone(next(n for n, c in CASES.items() if c.save == case.restore))
        return run(in_folder(case, one), jax.devices()[: PROCESSES * DEVICES])

    return alone


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_like_one(name: str, two: Both, run_alone: Any) -> None:
    right = run_alone(name)
    assert len(set(right["losses"])) == CASES[name].steps
    for seen in two.seen(name):
        for key in ("losses", "norms", "held_out"):
            assert seen[key] == pytest.approx(right[key], rel=1e-6), key
        assert set(seen["own_shards"]) == {DEVICES}


@pytest.mark.parametrize("name", CASES)
def test_each_process_reads_its_own_rows(name: str, two: Both, run_alone: Any) -> None:
    first, second = (seen["rows"] for seen in two.seen(name))
    joined = [a + b for a, b in zip(first, second, strict=True)]
    assert joined == run_alone(name)["rows"]
    assert all(len(rows) == BATCH // PROCESSES for rows in first)


def test_checkpoint_of_two_processes_restores_in_one(two: Both, run_alone: Any) -> None:
    two.seen("data4")
    case = dataclasses.replace(CASES["tensor4"], restore=str(two.folder / "first"))
    found, right = run(case, jax.devices()[:4]), run_alone("tensor4")
    assert found["rows"] == right["rows"]
    assert found["losses"] == pytest.approx(right["losses"], rel=1e-6)
    assert found["held_out"] == pytest.approx(right["held_out"], rel=1e-6)


def test_checkpoint_of_one_process_restores_in_two(two: Both, run_alone: Any) -> None:
    right = run_alone("tensor4")
    for seen in two.seen("from one"):
        assert seen["losses"] == pytest.approx(right["losses"], rel=1e-6)
        assert seen["held_out"] == pytest.approx(right["held_out"], rel=1e-6)


def test_rows_of_all_processes_are_refused_on_each(two: Both) -> None:
    for seen in two.seen("data4"):
        assert "must be int32[8, 7]" in seen["refusal"]
        assert "this process's of 16 rows" in seen["refusal"]


def test_batch_that_one_process_refuses_is_refused_on_each(two: Both) -> None:
    first, second = two.seen("data4")
    assert "process 1 has an invalid batch, see its error" in first["refused"]
    assert "leaf tokens is int32[4, 6], but must be int32[4, 7]" in second["refused"]


def test_damage_that_one_process_reads_is_raised_on_each(two: Both) -> None:
    """So all go on to the step before."""
    first, second = (seen["together"] for seen in two.seen("data4"))
    assert second == "w[0:8] is not what the devices held"
    assert first == f"process 1: {second}"


def test_programs_that_are_not_the_same_are_refused_on_each(two: Both) -> None:
    """They would wait for each other for ever, or compute with each other's bytes."""
    for seen in two.seen("data4"):
        assert "process 1 has traced another program ('step')" in seen["programs"]
        assert "multiply" in seen["programs"] or "constant" in seen["programs"]


SLOW_CASES = (
    Case(data=4, tensor=1, zero=3, steps=1, evaluated=((5, 8), (0, 6), (3, 3))),
    Case(data=2, tensor=2, zero=1, steps=1, evaluated=((8, 5),)),
    # One device of each process.
    Case(data=2, tensor=1, zero=1, steps=1),
)


@pytest.mark.slow
def test_processes_evaluate_other_numbers_of_rows_and_own_a_smaller_mesh(
    tmp_path: Path,
) -> None:
    right = [run(case, jax.devices()[: case.data * case.tensor]) for case in SLOW_CASES]
    for process in launch(SLOW_CASES, tmp_path):
        for case, want, seen in zip(SLOW_CASES, right, process, strict=True):
            assert seen["losses"] == pytest.approx(want["losses"], rel=1e-6)
            found, wanted = np.array(seen["evaluated"]), np.array(want["evaluated"])
            assert len(found) == len(case.evaluated)
            assert found == pytest.approx(wanted, rel=1e-6)
            assert set(seen["own_shards"]) == {case.data * case.tensor // PROCESSES}


def test_failure_of_a_process_is_shown(tmp_path: Path) -> None:
    missing = Case(data=4, tensor=1, zero=0, restore=str(tmp_path / "missing"))
    with pytest.raises(AssertionError, match="has no complete checkpoint"):
        launch([missing], tmp_path)
