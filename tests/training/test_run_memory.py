"""Does a run that is kept in memory lose at most the steps since the last copy?"""

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import pytest

from jaxpar.checkpoint import Checkpoints, memory_tier
from jaxpar.launch.exit_codes import CORRUPT
from jaxpar.training.signals import RunStopped
from tests.runs import (
    RULES,
    Data,
    bits,
    events,
    flip_in_one_replica,
    fresh,
    go,
    losses,
    nan_in_one_row,
    terminate,
)

EVERY, STEPS, SAVE_EVERY = 3, 12, 8
KEPT = dataclasses.replace(RULES, memory_every=EVERY)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the memory of this test's runs."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(memory_tier, "ROOT", str(folder))
    return folder


@functools.cache
def undisturbed(folder: Path) -> tuple[list[bytes], dict[int, float]]:
    engine = fresh()
    go(engine, Data(), folder, steps=STEPS, save_every=SAVE_EVERY)
    return bits(engine), losses(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def train(folder: Path, data: Data, **options: Any) -> list[bytes]:
    engine = fresh()
    given = {"steps": STEPS, "save_every": SAVE_EVERY, "recovery": KEPT}
    go(engine, data, folder, **given | options)
    return bits(engine)


def fail() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("at", "resumed"), [(2, None), (5, 3), (7, 6), (10, 9)])
def test_failed_run_goes_on_from_memory_and_ends_equal(
    at: int, resumed: int | None, base: Path, tmp_path: Path, memory: Path
) -> None:
    """`at` batches had been drawn; the checkpoints are of steps 0 and 8."""
    expected, logged = undisturbed(base / "whole")
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(out, Data(calls={at: fail}))
    assert train(out, Data()) == expected
    assert losses(out) == logged
    has_events = (out / "events.jsonl").exists()
    found = events(out, "restored from memory") if has_events else []
    assert [each["step"] for each in found] == ([resumed] if resumed else [])
    assert list(memory.iterdir()) == [], "a run that has ended keeps no memory"


def test_run_that_fails_again_and_again_ends_equal(base: Path, tmp_path: Path) -> None:
    """More often than there are checkpoints."""
    expected, logged = undisturbed(base / "whole")
    out = tmp_path / "run"
    for at in (4, 7, 10):
        with pytest.raises(KeyboardInterrupt):
            train(out, Data(calls={at: fail}), save_every=100)
    assert train(out, Data()) == expected
    assert losses(out) == logged
    assert [e["step"] for e in events(out, "restored from memory")] == [3, 6, 9]
    assert Checkpoints(out / "checkpoints").steps() == [0, 12]


def test_newer_checkpoint_goes_before_memory(base: Path, tmp_path: Path) -> None:
    expected, _ = undisturbed(base / "whole")
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(out, Data(calls={8: fail}), save_every=4)
    assert train(out, Data()) == expected
    assert not (out / "events.jsonl").exists()


def test_run_that_was_told_to_end_keeps_no_memory(tmp_path: Path, memory: Path) -> None:
    with pytest.raises(RunStopped):
        train(tmp_path / "run", Data(calls={4: terminate}))
    assert list(memory.iterdir()) == []


def test_rollback_leaves_memory_behind(tmp_path: Path) -> None:
    """Its step is newer than the checkpoint that the run went back to."""
    boosts = {ordinal: nan_in_one_row() for ordinal in (5, 6, 7)}
    whole = train(tmp_path / "whole", Data(boosts), recovery=RULES, save_every=4)
    out = tmp_path / "run"
    # Steps 4 (saved) and 6 (in memory), then back to 4; it fails before 6 is done.
    with pytest.raises(KeyboardInterrupt):
        train(out, Data(boosts, {8: fail}), save_every=4)
    assert train(out, Data(boosts), save_every=4) == whole
    assert not events(out, "restored from memory")


def test_corrupt_state_is_not_resumed_from_memory(tmp_path: Path) -> None:
    """The copy may have been made after a bit had flipped."""
    engine, out = fresh(), tmp_path / "run"
    flip = {4: lambda: flip_in_one_replica(engine, random.Random(0))}
    rules = dataclasses.replace(KEPT, probe_every=7)
    with pytest.raises(RunStopped) as stopped:
        go(engine, Data(calls=flip), out, steps=STEPS, save_every=100, recovery=rules)
    assert stopped.value.code == CORRUPT
    whole = train(tmp_path / "whole", Data(), recovery=RULES)
    assert train(out, Data()) == whole
    assert not events(out, "restored from memory")
