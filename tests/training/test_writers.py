"""Do the numbers of a run reach other programs, and does none of them end the run?"""

import dataclasses
import struct
import sys
import types
import warnings
from pathlib import Path

import jax.numpy as jnp
import pytest
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)

import jaxpar
from jaxpar.training.metrics import MetricsLogger, read_metrics
from jaxpar.training.writers import MLflow, TensorBoard, Wandb, writers_of
from tests.runs import RULES, Data, events, fresh, nan_in_one_row, run_in


def read_events(folder) -> list[Event]:
    """Read the records of event files: length, its checksum, event, its checksum."""
    events = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            events.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return events


def scalars(events) -> list[tuple[str, int, float, float]]:
    return [
        (value.tag, event.step, value.simple_value, event.wall_time)
        for event in events
        for value in event.summary.value
    ]


def test_tensorboard_holds_the_same_numbers(tmp_path, clock):
    with MetricsLogger(tmp_path, console=False, writers=[TensorBoard()]) as logger:
        logger.log(1, {"train/loss": jnp.float32(0.5)})
        logger.log(2, {"train/loss": 0.25, "train/grad_norm": 2.0})
    assert scalars(read_events(tmp_path / "tensorboard")) == [
        ("train/loss", 1, 0.5, 1000.0),
        ("train/loss", 2, 0.25, 1000.0),
        ("train/grad_norm", 2, 2.0, 1000.0),
    ]


def test_tensorboard_is_told_what_happens_again(tmp_path):
    for resume_at in (None, 5):
        with MetricsLogger(
            tmp_path,
            console=False,
            writers=[TensorBoard()],
            append=resume_at is not None,
            resume_at=resume_at,
        ) as logger:
            logger.log(6, {"train/loss": 1.0})
    events = read_events(tmp_path / "tensorboard")
    starts = [
        event.step for event in events if event.session_log.status == SessionLog.START
    ]
    assert starts == [6]
    assert [step for _, step, *_ in scalars(events)] == [6, 6]


@pytest.mark.parametrize(
    "config",
    [
        jaxpar.StartOptions(tensorboard=True),
        jaxpar.StartOptions(writers=("tensorboard", "tensorboard")),
        types.SimpleNamespace(tensorboard=True),
    ],
)
def test_writers_of_a_config_are_made_or_what_they_lack_is_named(config, monkeypatch):
    (made,) = writers_of(config)
    assert isinstance(made, TensorBoard)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"needs tensorboardX.*'jaxpar\[tensorboard\]'"
    ):
        writers_of(config)


def test_config_that_names_no_writer_has_none(monkeypatch):
    monkeypatch.setattr("jaxpar.training.writers.NAMED", {})
    assert writers_of(jaxpar.StartOptions()) == writers_of(object()) == ()


def test_name_of_no_writer_is_refused():
    with pytest.raises(ValueError, match=r"'csv' is not a writer; .* mlflow"):
        writers_of(jaxpar.StartOptions(writers=("wandb", "csv")))


class Broken:
    def __init__(self, fails_in: str):
        self.fails_in, self.calls = fails_in, []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_in:
            raise RuntimeError("no space there")

    def begin(self, folder, settings, resume_at):
        self._called("begin")

    def write(self, step, seconds, numbers):
        self._called("write")

    def close(self):
        self._called("close")


@pytest.mark.parametrize("fails_in", ["begin", "write", "close"])
def test_writer_that_fails_warns_once_and_the_run_goes_on(tmp_path, fails_in):
    broken, sound = Broken(fails_in), Broken("")
    with pytest.warns(UserWarning, match=r"Broken failed \(no space there\)") as said:
        jaxpar.train(
            fresh(),
            Data(),
            run_in(tmp_path),
            steps=3,
            save_every=3,
            writers=[broken, sound],
            recovery=RULES,
        )
    assert sum("Broken failed" in str(each.message) for each in said) == 1
    # What it holds open is closed, and nothing else is asked of it.
    assert broken.calls[-2:] == [fails_in, "close"]
    assert broken.calls.count(fails_in) == (2 if fails_in == "close" else 1)
    assert sound.calls == ["begin", "write", "write", "write", "close"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_writer_that_has_failed_stays_out_after_a_rollback(tmp_path):
    broken = Broken("write")
    boosts = {ordinal: nan_in_one_row() for ordinal in (4, 5, 6)}
    options = {"steps": 12, "save_every": 2, "recovery": RULES}
    with pytest.warns(UserWarning, match="Broken failed") as said:
        jaxpar.train(
            fresh(), Data(boosts), run_in(tmp_path), writers=[broken], **options
        )
    assert events(tmp_path, "rolled back")
    assert sum("Broken failed" in str(each.message) for each in said) == 1
    assert broken.calls == ["begin", "write", "close"]


def log_twice(folder: Path, writer) -> None:
    """Two starts of a run; the second one repeats step 2."""
    for resume_at, steps in ((None, (1, 2)), (1, (2, 3))):
        with MetricsLogger(
            folder,
            console=False,
            writers=[writer],
            settings={"learning_rate": 0.1, "mesh": {"data": 2}},
            append=resume_at is not None,
            resume_at=resume_at,
        ) as logger:
            for step in steps:
                logger.log(step, {"train/loss": 1.0 / step, "eval/text/loss": 2.0})


def test_wandb_has_an_offline_run_that_goes_on(tmp_path):
    pytest.importorskip("wandb", reason="jaxpar[wandb] is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log_twice(tmp_path, Wandb(mode="offline", entity="nobody"))
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    own = (tmp_path / "wandb.id").read_text()
    assert runs
    assert all(own in run.name for run in runs)
    content = b"".join(f.read_bytes() for run in runs for f in run.glob("*.wandb"))
    for text in (b"train/loss", b"eval/text/loss", b"learning_rate"):
        assert text in content


def test_mlflow_has_one_run_with_every_step(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="jaxpar[mlflow] is not installed")
    # Its folder of files is in maintenance; a database needs the large package.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = f"file://{tmp_path}/store"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log_twice(tmp_path / "run", MLflow("mine", store))
        client = mlflow.MlflowClient(store)
        experiment = client.get_experiment_by_name("mine")
        (run,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [
        (1, 1.0), (2, 0.5), (2, 0.5), (3, 1 / 3),
    ]  # fmt: skip
    assert run.data.params["learning_rate"] == "0.1"
    assert run.data.metrics["eval/text/loss"] == 2.0
    assert run.info.status == "FINISHED"


def test_missing_package_is_named_before_anything_is_made(tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Config:
        writers: tuple[str, ...] = ("wandb",)

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxpar\[wandb\]'"):
        jaxpar.open_run(tmp_path / "run", Config(), {})
    assert not (tmp_path / "run").exists()
