"""Does one step of a run follow another in order? Most is in test_loop.py."""

from pathlib import Path

import pytest

from jaxpar.checkpoint import Checkpoints, Keep
from jaxpar.training.loop import train
from jaxpar.training.metrics import read_metrics
from tests.runs import ROWS, RULES, Data, events, fresh, go, nan_in_one_row, run_in


def test_error_of_a_hook_is_the_users_and_is_not_hidden(tmp_path: Path) -> None:
    def hook(step: int, metrics: dict, engine: object) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(
            fresh(),
            Data(),
            run_in(tmp_path),
            steps=2,
            save_every=2,
            hooks=[hook],
            recovery=RULES,
        )
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_times_of_steps_after_a_rollback_are_their_own(tmp_path: Path) -> None:
    boosts = {ordinal: nan_in_one_row() for ordinal in (4, 5, 6)}
    go(fresh(), Data(boosts), tmp_path, steps=8, save_every=8)
    assert events(tmp_path, "rolled back")
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert all(record["perf/step_seconds"] > 0 for record in found)


def test_best_checkpoints_are_chosen_among_all(tmp_path: Path) -> None:
    """Also where evaluations are at other steps than saves."""
    by_step = {0: 9.0, 2: 1.0, 3: 0.1, 4: 3.0, 6: 2.0}
    engine, keep = fresh(), Keep(1, best=1)

    def evaluate() -> float:
        return by_step[engine.steps]

    go(
        *(engine, Data(), tmp_path),
        **{"steps": 6, "save_every": 2, "keep": keep},
        **{"evaluate": evaluate, "eval_every": 3},
    )
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2, 6]


def test_accuracy_chooses_no_checkpoint(tmp_path: Path) -> None:
    """The lowest one would be kept as the best."""
    engine, keep = fresh(), Keep(1, best=1)
    go(
        *(engine, Data(), tmp_path),
        **{"steps": 4, "save_every": 2, "keep": keep},
        evaluate=lambda: {"accuracy": engine.steps / 10},
    )
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4]


def test_rows_of_foreign_data_are_its_own(tmp_path: Path) -> None:
    """An iterator may have an attribute of that name that is no count."""

    class Foreign(Data):
        rows = property(lambda self: [1, 2, 3])

    go(fresh(), Foreign(), tmp_path, steps=2, save_every=2)
    meta = Checkpoints(tmp_path / "checkpoints").meta(2)
    assert (meta["batches_drawn"], meta["rows_drawn"]) == (2, 2 * ROWS)
