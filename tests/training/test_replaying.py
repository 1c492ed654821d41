"""Does a run with replays train as one without, and end where they differ?"""

import dataclasses
from pathlib import Path

import jax
import pytest

import jaxpar
from jaxpar.checkpoint import Checkpoints
from jaxpar.launch.exit_codes import CORRUPT, FINAL
from jaxpar.training.goodput import read_account
from jaxpar.training.recovery import Recovery
from jaxpar.training.signals import RunStopped
from tests.runs import RULES, Data, bits, events, fresh, go, losses, make_engine
from tests.wrong_devices import faulty_result, scale

OFTEN = dataclasses.replace(RULES, replay_every=3)


def test_run_with_replays_is_the_one_without_to_the_bit(tmp_path: Path) -> None:
    found = []
    for name, rules in (("without", RULES), ("with", OFTEN)):
        engine, folder = fresh(), tmp_path / name
        go(engine, Data(), folder, steps=7, save_every=4, recovery=rules)
        found.append((bits(engine), losses(folder)))
    assert found[0] == found[1]
    (event,) = events(tmp_path / "with", "replays")
    assert (event["step"], event["compared"]) == (1, "to the bit")
    (account,) = read_account(tmp_path / "with")
    assert account["seconds"]["replay"] > 0


@pytest.mark.parametrize("start", [0, 4])
def test_steps_that_are_due_and_the_first_of_a_start_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    engine, seen = fresh(), []
    if start:
        go(engine, Data(), tmp_path, steps=start, save_every=4)
    check = engine.replays().check
    monkeypatch.setattr(
        engine.replays(), "check", lambda m: (seen.append(engine.steps), check(m))
    )
    go(engine, Data(), tmp_path, steps=7, save_every=4, recovery=OFTEN)
    assert seen == [start + 1, *(s for s in (3, 6) if s > start)]


def test_faulty_device_ends_the_run_before_its_step_is_saved(tmp_path: Path) -> None:
    """It is found at the step that is replayed, and named."""
    engine = fresh()
    fault = faulty_result(engine, 0, "params/out/kernel", 5)
    calls = {5: fault.__enter__}
    with pytest.raises(RunStopped) as stopped:
        go(engine, Data(calls=calls), tmp_path, steps=9, save_every=3, recovery=OFTEN)
    fault.__exit__(None, None, None)
    assert stopped.value.code == CORRUPT
    assert CORRUPT in FINAL
    (event,) = events(tmp_path, "stopped")
    assert event["step"] == 6
    assert "step 6: the step and its replay on shifted devices" in event["why"]
    assert "By the vote of 3 runs device 5 (" in event["why"]
    assert event["why"].endswith("The last step with equal results is 3.")
    assert Checkpoints(tmp_path / "checkpoints").steps() == [0, 3]


def test_tolerance_is_said(tmp_path: Path) -> None:
    engine = fresh()
    replays = engine.replays()
    replays.tolerance = None
    with faulty_result(engine, 1, "params/out/kernel", 2, scale(1 + 1e-5)):
        go(engine, Data(), tmp_path, steps=1, save_every=1, recovery=OFTEN)
    (event,) = events(tmp_path, "replays")
    assert event["tolerance"] == replays.tolerance == pytest.approx(8e-5, rel=0.1)
    assert "of a shard's norm, 8 times what runs of this" in event["compared"]
    replays.tolerance = 0.0


def test_engine_that_cannot_replay_is_refused_before_a_step(tmp_path: Path) -> None:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=1), jax.devices()[:1])
    engine = make_engine(mesh=mesh)
    match = "recovery: replay_every=3: replays: the mesh has one device"
    with pytest.raises(ValueError, match=match):
        go(engine, Data(), tmp_path, recovery=OFTEN)
    assert engine.steps == 0


def test_negative_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="replay_every=-1 must be at least 0"):
        Recovery(replay_every=-1)
