"""Do files of a run's folder that were changed in any way do no harm to a start?

What a start reads besides a checkpoint, mutated as in tests/launch/test_fuzz.py: it is
read as it was written, or set aside, or nothing; what a user names is refused by a
ValueError.
"""

import contextlib
import functools
import json
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from jaxpar.compiled.budget import Budget
from jaxpar.data import open_corpus
from jaxpar.training import goodput, record
from jaxpar.training.mending import mend
from jaxpar.training.metrics import read_metrics
from jaxpar.training.run import Run
from tests.launch.test_fuzz import Case, attack
from tests.runs import Data, fresh, go, nan_in_one_row

FILES = ("run.json", "goodput.json", "events.jsonl", "metrics.jsonl")
COUNT, COUNT_OF_ALL = 12, 10_000


@functools.cache
def run_folder() -> Path:
    """A run that has rolled back once."""
    folder = Path(tempfile.mkdtemp()) / "run"
    boosts = {ordinal: nan_in_one_row() for ordinal in (2, 3, 4)}
    go(fresh(), Data(boosts), folder, steps=4, save_every=2)
    return folder


def write_run(folder: Path, name: str) -> Path:
    shutil.copytree(run_folder(), folder, dirs_exist_ok=True)
    return folder / name


def read_run(path: Path) -> None:
    """As a start does, in a copy: what is damaged is renamed."""
    with (
        tempfile.TemporaryDirectory() as made,
        contextlib.redirect_stdout(None),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # Of a last line that was cut.
        place = Path(made)
        for name in FILES:
            shutil.copy(path.parent / name, place)
        (place / record.CHECKPOINTS).symlink_to(run_folder() / record.CHECKPOINTS)
        run = Run(place, {"config": {}})
        found = record.read(place)
        assert found is not None
        assert isinstance(found["config"], dict)
        mend(run)
        run.events()
        run.rows_left_out(16)
        run.numbers_before(3, 10)
        run.evaluated_until(3)
        read_metrics(place / "metrics.jsonl")
        goodput.show(place, Console(file=None, quiet=True))
        clock = goodput.Clock(place)
        clock.resume(2)
        clock.write()
        assert goodput.read_account(place)


def write_budget(folder: Path) -> Path:
    path = folder / "budget.json"
    budget = Budget(8, {"data": {"all-gather": 8}}, peak_bytes=9, unbounded=("pipe",))
    path.write_text(budget.as_json())
    return path


def read_budget(path: Path) -> None:
    budget = Budget.from_json(path.read_text(encoding="utf-8", errors="replace"))
    assert all(isinstance(x, dict) for x in dict(budget.communicated).values())


def write_index(folder: Path) -> Path:
    """What text is encoded to, beside it."""
    rows = [json.dumps({"text": f"{i} two three"}) + "\n" for i in range(40)]
    (folder / "a.jsonl").write_text("".join(rows))
    (folder / "sha256").write_text(open_corpus([folder / "a.jsonl"]).sha256)
    (found,) = folder.rglob("index.json")
    return found


def read_index(path: Path) -> None:
    """Where the index is damaged the text is encoded anew, in its place."""
    with contextlib.redirect_stdout(None):
        folder = path.parents[2]
        found = open_corpus([folder / "a.jsonl"])
        assert found.sha256 == (folder / "sha256").read_text()


def run_case(name: str) -> Case:
    return Case(functools.partial(write_run, name=name), read_run)


CASES: dict[str, Case] = {
    **{name: run_case(name) for name in FILES},
    "index": Case(write_index, read_index),
    "budget": Case(write_budget, read_budget, (ValueError,)),
}


@pytest.mark.parametrize("name", CASES)
def test_mutated_file_does_no_harm(name: str, tmp_path: Path) -> None:
    attack(CASES[name], tmp_path, seed=29, count=COUNT)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ten_thousand_mutations_do_no_harm(name: str, tmp_path: Path) -> None:
    attack(CASES[name], tmp_path, seed=7, count=COUNT_OF_ALL // len(CASES) + 1)
