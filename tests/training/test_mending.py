"""Does a run go on from its checkpoint alone, whatever became of its other files?"""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxpar.checkpoint import Checkpoints
from jaxpar.training.metrics import read_metrics
from tests.runs import Data, bits, events, fresh, go, nan_in_one_row

FILES = ("run.json", "goodput.json", "events.jsonl", "metrics.jsonl")
STEPS, AT = 12, 9
BAD = {5: nan_in_one_row(), 6: nan_in_one_row(), 7: nan_in_one_row()}
"""Three skipped steps, after which a run rolls back and leaves their batches out."""
DAMAGES: dict[str, Any] = {
    "empty": lambda text: b"",
    "torn": lambda text: text[: len(text) // 2],
    "garbage": lambda text: b"\x93\x00\xff{[\n\x00\x01",
    "other type": lambda text: b'"a text"\n',
    "absent": None,
}


@functools.cache
def _ended(folder: Path, steps: int) -> list[bytes]:
    engine = fresh()
    go(engine, Data(BAD), folder, steps=steps, save_every=3)
    return bits(engine)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def killed(base: Path) -> Path:
    """A run that was killed after the save of a step, with rows left out."""

    def fail() -> None:
        raise KeyboardInterrupt

    data = Data(BAD, {AT + 4: fail})
    with pytest.raises(KeyboardInterrupt):
        go(fresh(), data, base / "killed", steps=STEPS, save_every=3)
    Checkpoints(base / "killed" / "checkpoints").wait()
    assert events(base / "killed", "rolled back")
    return base / "killed"


def go_on(folder: Path) -> list[bytes]:
    engine = fresh()
    go(engine, Data(BAD), folder, steps=STEPS, save_every=3)
    return bits(engine)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_run_ends_equal_to_the_bit(
    name: str,
    damage: str,
    base: Path,
    killed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(killed, folder, ignore=shutil.ignore_patterns("lease.*"))
    text, change = (folder / name).read_bytes(), DAMAGES[damage]
    if change is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(change(text))
    if (damage, name) == ("torn", "metrics.jsonl"):
        with pytest.warns(UserWarning, match="truncated"):
            assert go_on(folder) == _ended(base / "whole", STEPS)
    else:
        assert go_on(folder) == _ended(base / "whole", STEPS)
    is_torn_line = damage == "torn" and name.endswith(".jsonl")
    is_said = change is not None and not is_torn_line
    is_said &= not (damage == "empty" and name.endswith(".jsonl"))
    said = [x for x in capsys.readouterr().out.splitlines() if "was damaged" in x]
    assert len(said) == is_said, said
    assert all(name in line for line in said)
    assert (folder / f"{name}.damaged").exists() == is_said
    json.loads((folder / "run.json").read_text())["identity"]
    json.loads((folder / "goodput.json").read_text())[-1]["seconds"]
    assert read_metrics(folder / "metrics.jsonl")[-1]["step"] == STEPS
    events(folder, "any")


def test_all_at_once_leave_the_checkpoint(
    base: Path, killed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(killed, folder, ignore=shutil.ignore_patterns("lease.*"))
    for path in folder.iterdir():
        if path.name != "checkpoints":
            path.unlink()
    assert go_on(folder) == _ended(base / "whole", STEPS)
