"""Does a run go on as if nothing had happened, and is what went wrong left out?"""

import dataclasses
import functools
import itertools
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.checkpoint import Checkpoints
from jaxpar.launch.exit_codes import CORRUPT, DIVERGED, SAVE_FAILED, STOPPED
from jaxpar.training.loop import train
from jaxpar.training.metrics import read_metrics
from jaxpar.training.signals import RunStopped
from tests.equivalence import perceptron
from tests.runs import (
    ROWS,
    RULES,
    SAVE_EVERY,
    STEPS,
    Data,
    bits,
    events,
    flip_in_one_replica,
    fresh,
    go,
    losses,
    make_engine,
    nan_in_one_row,
    run_in,
    terminate,
)


@functools.cache
def undisturbed(precision: str, folder: Path) -> tuple[list[bytes], dict[int, float]]:
    engine = fresh(precision)
    go(engine, Data(), folder)
    return bits(engine), losses(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


LONG = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20)]


@pytest.mark.parametrize("seed", [0, 1, *LONG])
def test_interrupted_run_ends_equal_to_the_bit(
    seed: int, base: Path, tmp_path: Path
) -> None:
    """fp16's loss scale, dropout, micro-batches, shuffled data; each half its own."""
    expected, logged = undisturbed("fp16", base / "fp16")
    at = random.Random(seed).randrange(STEPS)
    with pytest.raises(RunStopped, match=f"SIGTERM received; step {at + 1}") as stopped:
        go(fresh("fp16"), Data(calls={at: terminate}), tmp_path)
    assert stopped.value.code == STOPPED
    assert Checkpoints(tmp_path / "checkpoints").latest() == at + 1
    engine = fresh("fp16")
    go(engine, Data(), tmp_path)
    assert bits(engine) == expected
    assert losses(tmp_path) == logged


def test_run_that_failed_goes_on_from_its_last_save(base: Path, tmp_path: Path) -> None:
    expected, logged = undisturbed("fp32", base / "fp32")

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(fresh(), Data(calls={2 * SAVE_EVERY + 3: fail}), tmp_path)
    engine = fresh()
    go(engine, Data(), tmp_path)
    assert bits(engine) == expected
    assert losses(tmp_path) == logged


def test_finished_run_does_nothing_when_started_again(tmp_path: Path) -> None:
    go(fresh(), Data(), tmp_path, steps=3)
    engine = fresh()
    go(engine, Data(), tmp_path, steps=3)
    assert int(engine.state.step) == 3


def test_scheduler_warning_saves_and_ends(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    warn = {4: lambda: os.kill(os.getpid(), signal.SIGUSR1)}
    with pytest.raises(RunStopped, match="SIGUSR1 received; step 5 is saved"):
        go(fresh(), Data(calls=warn), tmp_path)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_nan_in_one_shard_skips_the_step_everywhere(tmp_path: Path) -> None:
    at = 2 * SAVE_EVERY - 1
    go(fresh(), Data({at: nan_in_one_row()}), tmp_path, steps=at + 1)
    state = Checkpoints(tmp_path / "checkpoints")
    before = fresh()
    go(before, Data(), tmp_path / "before", steps=at)
    after = fresh()
    assert run_in(tmp_path).resume(after) == at + 1 == state.latest()
    for name in ("params", "opt_state"):
        mine, theirs = (getattr(e.state, name) for e in (after, before))
        assert [np.asarray(x).tobytes() for x in jax.tree.leaves(mine)] == [
            np.asarray(x).tobytes() for x in jax.tree.leaves(theirs)
        ]
    (event,) = events(tmp_path, "skipped")
    assert (event["step"], event["batch"]) == (at + 1, at)
    assert len(event["batch_xxh3"]) == 32


def test_nans_in_a_row_roll_back_and_their_batches_are_left_out(tmp_path: Path) -> None:
    bad = [20, 21, 22]
    data = Data(dict.fromkeys(bad, nan_in_one_row()))
    go(fresh(), data, tmp_path)
    (event,) = events(tmp_path, "rolled back")
    assert event["left_out"] == bad
    assert event["step"] == 18
    found = losses(tmp_path)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert np.isfinite(list(found.values())).all()


def test_spike_is_rolled_back_and_the_run_ends_as_well(
    base: Path, tmp_path: Path
) -> None:
    at = 25
    engine = fresh()
    go(engine, Data({at: np.full(ROWS, 10.0)}), tmp_path)
    (bad,) = events(tmp_path, "bad")
    assert (bad["step"], bad["batch"]) == (at + 1, at)
    assert "robust deviations above the median" in bad["why"]
    (back,) = events(tmp_path, "rolled back")
    assert (back["step"], back["left_out"]) == (24, [at])
    _, logged = undisturbed("fp32", base / "fp32")
    found = losses(tmp_path)
    assert all(found[step] == logged[step] for step in range(1, at + 1))
    tail = range(STEPS - 8, STEPS + 1)
    mean = np.mean([found[step] for step in tail])
    assert mean == pytest.approx(np.mean([logged[s] for s in tail]), rel=0.01)


def test_batches_left_out_stay_so_after_a_restart(tmp_path: Path) -> None:
    spike = {25: np.full(ROWS, 10.0)}
    whole = fresh()
    go(whole, Data(spike), tmp_path / "whole")
    with pytest.raises(RunStopped):
        go(fresh(), Data(spike, calls={30: terminate}), tmp_path / "halves")
    engine = fresh()
    go(engine, Data(spike), tmp_path / "halves")
    assert bits(engine) == bits(whole)
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")


def test_run_that_keeps_failing_stops_with_a_report(tmp_path: Path) -> None:
    spikes = {at: np.full(ROWS, 10.0) for at in range(20, 40)}
    rules = dataclasses.replace(RULES, rollbacks=2)
    with pytest.raises(RunStopped, match="after 2 rollbacks already") as stopped:
        go(fresh(), Data(spikes), tmp_path, recovery=rules)
    assert stopped.value.code == DIVERGED
    assert [e["left_out"] for e in events(tmp_path, "rolled back")] == [[20], [21]]
    (event,) = events(tmp_path, "stopped")
    assert event["code"] == DIVERGED


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A disk on which saves after the first `room` fail."""
    real, left = os.fsync, {"room": 10**9}

    def fsync(descriptor: int) -> None:
        left["room"] -= 1
        if left["room"] < 0:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return left


def test_failed_save_stops_the_run_with_its_code(
    full_disk: Any, tmp_path: Path
) -> None:
    def fill() -> None:
        full_disk["room"] = 0

    engine = fresh()
    calls = {SAVE_EVERY: engine.wait, SAVE_EVERY + 1: fill}
    with pytest.raises(RunStopped, match="No space left") as stopped:
        go(engine, Data(calls=calls), tmp_path)
    assert stopped.value.code == SAVE_FAILED
    full_disk["room"] = 10**9
    assert Checkpoints(tmp_path / "checkpoints").steps() == [0, SAVE_EVERY]
    assert run_in(tmp_path).resume(fresh()) == SAVE_EVERY


def test_failed_save_is_told_and_the_run_goes_on_if_asked(
    full_disk: Any, tmp_path: Path
) -> None:
    def fill() -> None:
        full_disk["room"] = 0

    def empty() -> None:
        full_disk["room"] = 10**9

    rules = dataclasses.replace(RULES, on_failed_save="warn")
    engine = fresh()
    calls = {SAVE_EVERY: engine.wait, SAVE_EVERY + 1: fill, 3 * SAVE_EVERY + 1: empty}
    go(engine, Data(calls=calls), tmp_path, recovery=rules, keep=None)
    failed = events(tmp_path, "save failed")
    assert failed
    assert all("No space left" in event["why"] for event in failed)
    steps = Checkpoints(tmp_path / "checkpoints").steps()
    assert {0, SAVE_EVERY, STEPS} <= set(steps)
    assert 2 * SAVE_EVERY not in steps


def test_corrupt_replica_stops_the_run_at_the_next_probe(tmp_path: Path) -> None:
    engine = fresh()
    flip = {8: lambda: flip_in_one_replica(engine, random.Random(0))}
    rules = dataclasses.replace(RULES, probe_every=5)
    with pytest.raises(RunStopped, match="step 10: replicas that should") as stopped:
        go(engine, Data(calls=flip), tmp_path, recovery=rules)
    assert stopped.value.code == CORRUPT


@pytest.mark.filterwarnings("ignore::jaxpar.engine.run_ahead.SkippedStepWarning")
def test_state_that_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    engine = fresh()
    engine.save(tmp_path)
    engine.wait()
    state = engine.state
    params = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.inf), state.params)
    engine._leaves = jax.tree.leaves(dataclasses.replace(state, params=params))
    engine.step(next(Data()))
    with pytest.raises(FloatingPointError, match=r"not finite: params/embed/embedding"):
        engine.save(tmp_path)
    engine.wait()
    assert Checkpoints(tmp_path).steps() == [0]


def test_heldout_loss_is_the_metric_that_the_best_go_by(tmp_path: Path) -> None:
    given = itertools.chain([5.0, 1.0, 3.0, 4.0, 2.0])
    train(
        fresh(),
        Data(),
        run_in(tmp_path),
        steps=8,
        save_every=2,
        keep=jaxpar.Keep(last=1, best=1),
        evaluate=lambda: next(given),
        recovery=RULES,
    )
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2, 8]
    records = read_metrics(tmp_path / "metrics.jsonl")
    found = {r["step"]: r["eval/loss"] for r in records if "eval/loss" in r}
    assert found == {0: 5.0, 2: 1.0, 4: 3.0, 6: 4.0, 8: 2.0}


def test_log_has_rates_and_several_evaluations_at_steps_of_their_own(
    tmp_path: Path,
) -> None:
    train(
        fresh(),
        Data(),
        run_in(tmp_path),
        steps=7,
        save_every=4,
        evaluate={"a": lambda: {"loss": 1.0, "hits": 2}, "b": lambda: 3.0},
        eval_every=3,
        recovery=RULES,
        tokens_per_step=10,
    )
    records = read_metrics(tmp_path / "metrics.jsonl")
    evaluated = [r["step"] for r in records if "eval/a/hits" in r]
    assert evaluated == [0, 3, 6, 7]
    assert records[0].keys() == {
        "step", "time", "eval/a/loss", "eval/a/hits", "eval/b/loss",
    }  # fmt: skip
    names = {"loss", "grad_norm", "skipped", "loss_scale"}
    rates = {"step_seconds", "data_seconds", "tokens_per_second", "memory_gb"}
    for record in records[1:]:
        assert record.keys() >= {f"train/{name}" for name in names}
        assert record.keys() >= {f"perf/{name}" for name in rates}
        seconds = record["perf/step_seconds"]
        assert record["perf/tokens_per_second"] == pytest.approx(10 / seconds)


def test_warm_up_longer_than_the_run_is_refused(tmp_path: Path) -> None:
    engine = perceptron.make_engine(jaxpar.optim.onebit_adam(1e-3, 9), 4, 1, 1)
    run, given = run_in(tmp_path), {"save_every": 5}
    with pytest.raises(ValueError, match=r"steps=9: .* whole gradients for 9 steps"):
        train(engine, iter(()), run, steps=3, total_steps=9, **given)


def test_hooks_see_every_number_a_step_late(tmp_path: Path) -> None:
    seen = []

    def hook(step: int, metrics: dict, engine: jaxpar.Engine) -> None:
        kind = next(iter(metrics)).partition("/")[0]
        seen.append((kind, step, engine.steps - step))

    options = {"save_every": 3, "evaluate": lambda: 1.0, "recovery": RULES}
    train(fresh(), Data(), run_in(tmp_path), steps=3, hooks=[hook], **options)
    late = [("train", 1, 1), ("train", 2, 1), ("train", 3, 0)]
    assert seen == [("eval", 0, 0), *late, ("eval", 3, 0)]


def test_hook_may_end_the_run(tmp_path: Path) -> None:
    def stop(step: int, metrics: dict, engine: jaxpar.Engine) -> None:
        if step == 2:
            raise RunStopped(0, "good enough")

    with pytest.raises(RunStopped, match="good enough"):
        go(fresh(), Data(), tmp_path, hooks=[stop])
    assert max(losses(tmp_path)) == 2


def test_run_goes_on_on_another_mesh(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The losses are the same, with dropout; the account is printed at the end."""
    go(fresh(), Data(), tmp_path / "one", steps=6)
    data, halves = Data(), {"total_steps": 6, "save_every": 3}
    capsys.readouterr()
    go(fresh(), data, tmp_path / "two", steps=3, **halves)
    said = capsys.readouterr().out
    assert "step 3/6" in said
    assert "goodput" not in said
    other = jaxpar.make_mesh(jaxpar.MeshShape(data=2), jax.devices()[:2])
    go(make_engine(mesh=other, zero=3), data, tmp_path / "two", steps=6, **halves)
    assert ", 2 starts" in capsys.readouterr().out
    expected = losses(tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(expected, rel=1e-5)


def test_run_whose_checkpoints_are_gone_is_no_fresh_start(tmp_path: Path) -> None:
    go(fresh(), Data(), tmp_path, steps=3)
    shutil.move(tmp_path / "checkpoints", tmp_path.parent / "elsewhere")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    message = r"has logged 3 steps, but there is no checkpoint in '.*checkpoints', so"
    with pytest.raises(FileNotFoundError, match=message):
        go(fresh(), Data(), tmp_path, steps=3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    shutil.move(tmp_path.parent / "elsewhere", tmp_path / "checkpoints")
    go(fresh(), Data(), tmp_path, steps=4)
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4]
