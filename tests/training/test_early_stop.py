"""Does a run end once its held-out loss no longer falls, also if it was interrupted?"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import jaxpar
from jaxpar.checkpoint import Checkpoints, Keep
from jaxpar.training.early_stop import EarlyStop, make_early_stop
from jaxpar.training.evaluations import Evaluations
from jaxpar.training.loop import train
from jaxpar.training.metrics import read_metrics
from jaxpar.training.opening import open_run
from jaxpar.training.signals import RunStopped
from tests.runs import (
    ROWS,
    RULES,
    Data,
    events,
    fresh,
    go,
    losses,
    run_in,
    terminate,
)

BY_STEP = {0: 5.0, 2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5, 10: 1.2, 12: 0.5, 14: 0.4, 16: 0.3}
THREE = EarlyStop(patience=3)


def heldout(engine: jaxpar.Engine) -> Callable[[], float]:
    """Losses by step; the low one of a step that is not due must never count."""
    return lambda: BY_STEP.get(engine.steps, 0.0)


def start(folder: Path, data: Data | None = None, **options: object) -> jaxpar.Engine:
    engine = fresh()
    given = {"steps": 16, "save_every": 2, "keep": 1, "early_stop": THREE}
    given |= {"evaluate": heldout(engine)}
    go(engine, data or Data(), folder, **(given | options))
    return engine


@pytest.mark.parametrize(
    ("found", "min_delta", "expected"),
    [
        ([3, 2, 1], 0.0, (2, 0)),
        ([3, 1, 1, 2], 0.0, (1, 2)),
        ([3, 2.9, 2.8, 2.7], 0.25, (3, 0)),
        ([3, 2.75, 2.5], 0.25, (2, 0)),
        ([3, 2.75], 0.25, (0, 1)),
        ([math.nan, 2, math.nan, -math.inf], 0.0, (1, 2)),
        ([math.nan, math.inf], 0.0, (None, 2)),
        ([], 0.0, (None, 0)),
    ],
)
def test_standing_is_that_of_the_losses_in_order(
    found: list, min_delta: float, expected: tuple
) -> None:
    by_step = dict(enumerate(map(float, found)))
    assert EarlyStop(1, min_delta).standing(by_step) == expected
    reversed_order = dict(reversed(by_step.items()))
    assert EarlyStop(1, min_delta).standing(reversed_order) == expected


def test_best_checkpoint_is_added_to_what_is_kept() -> None:
    assert THREE.kept(2) == Keep(last=2, best=1)
    assert THREE.kept(None) == Keep(last=None, best=1)
    assert THREE.kept(Keep(last=1, every=5, best=4)) == Keep(1, 5, 4)


def test_run_ends_finished_with_its_best_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    engine = start(tmp_path)
    assert engine.steps == 10, "three evaluations after step 4"
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4, 10]
    (event,) = events(tmp_path, "stopped early")
    assert (event["step"], event["best_step"]) == (10, 4)
    said = capsys.readouterr().out
    assert "no better held-out loss for 3 evaluations since step 4" in said
    assert "goodput" in said
    assert engine.restore(tmp_path / "checkpoints", step=4) == 4

    again = start(tmp_path)
    assert again.steps == 10
    assert "has stopped early at step 10: no better" in capsys.readouterr().out
    assert len(events(tmp_path, "stopped early")) == 1


def test_more_patience_or_none_goes_on(tmp_path: Path) -> None:
    start(tmp_path)
    assert start(tmp_path, early_stop=EarlyStop(4)).steps == 16
    assert sorted(losses(tmp_path)) == list(range(1, 17))


def test_min_delta_is_what_counts(tmp_path: Path) -> None:
    assert start(tmp_path, early_stop=EarlyStop(2, min_delta=1.75)).steps == 8


@pytest.mark.parametrize("at", [1, 5, 6, 7, 8, 9])
def test_interrupted_run_ends_at_the_same_step(at: int, tmp_path: Path) -> None:
    """Also by a signal at a step that is evaluated, which leaves no time for that."""
    with pytest.raises(RunStopped, match=f"step {at} is saved"):
        start(tmp_path, Data(calls={at - 1: terminate}))
    found = start(tmp_path)
    assert found.steps == 10
    assert 4 in Checkpoints(tmp_path / "checkpoints").steps()
    records = read_metrics(tmp_path / "metrics.jsonl")
    evaluated = [r["step"] for r in records if "eval/loss" in r]
    assert evaluated == [0, 2, 4, 6, 8, 10]


def test_rollback_forgets_what_came_after(tmp_path: Path) -> None:
    """Step 4 is evaluated twice, and the second time it is the best: it is saved."""
    seen = iter([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 0.5, 2.0, 2.0, 2.0])
    rules = dataclasses.replace(RULES, nonfinite=1)
    options = {"save_every": 3, "eval_every": 1, "recovery": rules, "steps": 7}
    options |= {"evaluate": lambda: next(seen), "early_stop": EarlyStop(9)}
    start(tmp_path, Data({5: np.full(ROWS, np.nan)}), **options)
    (back,) = events(tmp_path, "rolled back")
    assert back["step"] == 3
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4, 7]


def test_step_that_improves_is_saved_between_saves(tmp_path: Path) -> None:
    engine = start(tmp_path, save_every=100, eval_every=2, keep=1)
    assert engine.steps == 10
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4, 10]


def test_run_without_a_rule_saves_as_before(tmp_path: Path) -> None:
    start(tmp_path, steps=6, save_every=5, eval_every=2, keep=None, early_stop=None)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [0, 5, 6]


@dataclasses.dataclass(frozen=True)
class Config(jaxpar.StartOptions):
    name: str = "a"


def test_flags_of_a_config_make_the_rule(tmp_path: Path) -> None:
    config = Config(patience=3, min_delta=0.125)
    run = open_run(tmp_path, config, {})
    assert run.early_stop == EarlyStop(3, 0.125)
    assert run.record["config"] == {"name": "a"}
    engine = fresh()
    given = {"steps": 16, "save_every": 2, "recovery": RULES}
    loss = train(engine, Data(), run, evaluate=heldout(engine), **given)
    assert (engine.steps, loss) == (10, BY_STEP[10])


def test_wrong_rules_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="patience=0 must be at least 1 evaluation"):
        open_run(tmp_path / "run", Config(patience=0), {})
    assert not (tmp_path / "run").exists()
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"min_delta={wrong} must be at least 0"):
            EarlyStop(1, min_delta=wrong)
    with pytest.raises(ValueError, match=r"min_delta=0\.5 needs patience="):
        make_early_stop(None, 0.5)
    assert make_early_stop(None, 0.0) is None
    with pytest.raises(ValueError, match="patience=3 needs evaluate="):
        train(
            fresh(), Data(), run_in(tmp_path), steps=1, save_every=1, early_stop=THREE
        )
    with pytest.raises(ValueError, match=r"called loss, .* returns eval/accuracy; "):
        Evaluations(lambda: {"accuracy": 1.0}, None, THREE).run()
