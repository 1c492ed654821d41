"""Are the steps traced that were asked for, and does every trace end with the run?"""

import dataclasses
import json
import signal
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar.training.opening import open_run
from jaxpar.training.profile import FOLDER, profiled_steps
from jaxpar.training.signals import RunStopped
from tests.runs import Data, fresh, go, nan_in_one_row, run_in, terminate

STEPS = 8
GO: dict[str, Any] = {"steps": STEPS, "save_every": 4}


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int = STEPS
    profile: str = "9:10"


def files(folder: Path) -> list[Path]:
    return list((folder / FOLDER).glob("plugins/profile/*/*.xplane.pb"))


def is_tracing(folder: Path) -> bool:
    """Whether a trace is running, which no other may join."""
    try:
        jax.profiler.start_trace(folder / "other")
    except RuntimeError:
        return True
    jax.profiler.stop_trace()
    return False


@pytest.mark.parametrize(
    ("profile", "steps"),
    [
        ("10:15", (10, 15)),
        ((3, 3), (3, 3)),
        ("1:100", (1, 100)),
        (None, None),
        ("", None),
    ],
)
def test_range_is_the_first_and_the_last_step(profile, steps):
    assert profiled_steps(profile, 100) == steps


@pytest.mark.parametrize(
    "profile", ["0:3", "5:4", "90:101", "5", "a:b", "1:2:3", "-1:4", (9, 8)]
)
def test_range_outside_of_the_run_is_refused(profile):
    with pytest.raises(ValueError, match=r"profile=.* this run's steps 1 to 100\."):
        profiled_steps(profile, 100)


def test_range_is_refused_before_the_folder_is_made(tmp_path):
    with pytest.raises(ValueError, match=r"profile='9:10' .* steps 1 to 8\."):
        open_run(tmp_path / "run", Config(), {})
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="profile='9:10'"):
        go(fresh(), Data(), tmp_path, **GO, profile="9:10")
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> tuple[Path, float]:
    """A run with steps 3 to 5 traced, an evaluation between; seconds of the run."""
    folder, engine = tmp_path_factory.mktemp("profiled"), fresh()
    began = time.monotonic()
    go(engine, Data(), folder, **GO, evaluate=lambda: 1.0, profile="3:5")
    return folder, time.monotonic() - began


def test_summary_accounts_for_the_steps(profiled):
    folder, seconds = profiled
    summary = json.loads((folder / FOLDER / "summary.json").read_text())
    assert summary["steps"] == [3, 5]
    assert summary["devices"] == 8
    assert summary["total"] == pytest.approx(sum(summary["seconds"].values()))
    assert 0 < 3 * (summary["total"] + summary["left_out"]) < seconds
    assert summary["left_out"] > 0, "step 4 is evaluated and saved"
    tops = [row for row in summary["rows"] if "/" not in row["path"]]
    ran = summary["seconds"]["compute"] + summary["seconds"]["communication"]
    assert sum(row["seconds"] for row in tops) == pytest.approx(ran)
    rows = {row["path"]: row for row in tops}
    assert {"embed", "out", "(update)"} <= set(rows)
    assert rows["embed"]["parameters"] == 40 * 16
    assert rows["out"]["seconds"] > 0
    # Forward, and both gradients.
    assert rows["out"]["flops"] == 3 * 2 * 16 * 8 * 16 * 40
    assert summary["unknown"] < 0.2 * ran


def test_table_and_trace_are_written(profiled):
    folder, _ = profiled
    text = (folder / FOLDER / "summary.txt").read_text()
    assert text.startswith("steps 3 to 5: ")
    for word in ("exposed communication", "input", "embed", "(nothing ran)", "100.0"):
        assert word in text
    (file,) = files(folder)
    assert list(file.parent.glob("*.trace.json.gz"))
    assert not is_tracing(folder)


def test_run_that_ends_within_the_range_goes_on_with_its_rest(tmp_path, capsys):
    go(fresh(), Data(), tmp_path, **GO | {"steps": 4}, total_steps=8, profile="3:6")
    written = tmp_path / FOLDER / "summary.json"
    assert json.loads(written.read_text())["steps"] == [3, 4]
    go(fresh(), Data(), tmp_path, **GO, profile="3:6")
    assert json.loads(written.read_text())["steps"] == [5, 6]
    assert not is_tracing(tmp_path)
    capsys.readouterr()
    go(fresh(), Data(), tmp_path, **GO | {"steps": 9}, profile="3:6")
    assert "profile 3:6: those steps are done already" in capsys.readouterr().out
    assert json.loads(written.read_text())["steps"] == [5, 6]


@pytest.mark.parametrize("ends", ["signal", "exception"])
def test_trace_stops_when_the_run_does(ends, tmp_path, capsys):
    def fail() -> None:
        raise KeyboardInterrupt

    calls = {3: terminate if ends == "signal" else fail}
    with pytest.raises(RunStopped if ends == "signal" else KeyboardInterrupt):
        go(fresh(), Data(calls=calls), tmp_path, **GO, profile="3:6")
    assert not is_tracing(tmp_path)
    assert len(files(tmp_path)) == 1
    assert "stopped early" in capsys.readouterr().out
    assert not (tmp_path / FOLDER / "summary.json").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_steps_after_a_rollback_are_traced_anew(tmp_path, capsys):
    boosts = {ordinal: nan_in_one_row() for ordinal in (4, 5, 6)}
    data = Data(boosts)
    go(fresh(), data, tmp_path, **GO | {"steps": 12}, profile="5:8")
    assert json.loads((tmp_path / FOLDER / "summary.json").read_text())["steps"] == [
        5,
        8,
    ]
    assert "stopped early" in capsys.readouterr().out
    assert not is_tracing(tmp_path)
    assert run_in(tmp_path).events()


def test_phases_and_steps_are_annotated(profiled):
    folder, _ = profiled
    (file,) = files(folder)
    (plane,) = [
        plane
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        if plane.name == "/host:CPU"
    ]
    events = [event for line in plane.lines for event in line.events]
    names = [e.name for e in events if e.name == "train" or e.name.startswith("loop/")]
    assert names.count("train") == 3
    assert {"loop/data", "loop/step", "loop/save", "loop/evaluate"} <= set(names)
