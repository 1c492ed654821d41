"""Does a folder belong to one run, and is what it holds left alone?"""

import dataclasses
import json
import platform
import sys
from pathlib import Path

import flax
import jax
import optax
import pytest

from jaxpar.launch.lease import is_lease
from jaxpar.mesh import MeshShape
from jaxpar.training.opening import open_run


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int = 10
    mesh: MeshShape = dataclasses.field(default_factory=lambda: MeshShape(data=2))
    data: tuple[str, ...] = ("a", "b")


IDENTITY = {"corpus_sha256": "abc"}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not is_lease(file.name)
    }


def test_first_start_records_config_identity_and_versions(tmp_path):
    run = open_run(tmp_path / "runs" / "a", Config(), IDENTITY)
    assert run.folder == tmp_path / "runs" / "a"
    assert run.record == json.loads((run.folder / "run.json").read_text())
    commit = run.record["commit"]
    assert commit is None or len(commit) >= 40
    assert run.record == {
        "config": {
            "steps": 10,
            "mesh": {"data": 2, "pipe": 1, "tensor": 1, "replica": 1, "expert": 1},
            "data": ["a", "b"],
        },
        "identity": IDENTITY,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
        },
        "command": sys.argv,
        "commit": commit,
    }


@dataclasses.dataclass(frozen=True)
class Drawn(Config):
    tensorboard: bool = True


def test_missing_package_is_said_before_the_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    said = (
        r"^TensorBoard \(--tensorboard\) needs tensorboardX, .*'jaxpar\[tensorboard\]'$"
    )
    with pytest.raises(ModuleNotFoundError, match=said):
        open_run(tmp_path / "run", Drawn(), IDENTITY)
    assert not (tmp_path / "run").exists()


def test_empty_folder_is_taken(tmp_path):
    assert (open_run(tmp_path, Config(), IDENTITY).folder / "run.json").exists()


def test_same_run_is_resumed_whatever_the_versions(tmp_path):
    record = open_run(tmp_path, Config(), IDENTITY).folder / "run.json"
    found = json.loads(record.read_text())
    record.write_text(json.dumps(found | {"versions": {"jax": "0.0.1"}}))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    before = contents(tmp_path)
    assert open_run(str(tmp_path), Config(), IDENTITY).folder == tmp_path
    assert contents(tmp_path) == before


@dataclasses.dataclass(frozen=True)
class Watched(Config):
    recovery: dict[str, float] = dataclasses.field(default_factory=dict)


def test_run_goes_on_under_other_rules_of_recovery(tmp_path):
    """They change no number; where the caller says that they do, it is another run."""
    record = open_run(tmp_path, Watched(recovery={"spike": 9.0}), IDENTITY).record
    (tmp_path / "metrics.jsonl").touch()
    other = Watched(recovery={"spike": 5.0, "new": 1.0})
    again = open_run(tmp_path, other, IDENTITY).record
    assert again["history"][0]["changed"].keys() == {"recovery"}
    assert again["command"] == record["command"]
    with pytest.raises(ValueError, match=r"recovery is .* there"):
        open_run(tmp_path, other, IDENTITY, may_change=())


def test_folder_of_a_launch_is_no_other_run(tmp_path):
    (tmp_path / "launch").mkdir()
    assert (open_run(tmp_path, Config(), IDENTITY).folder / "run.json").exists()


def test_other_run_is_refused_and_nothing_lost(tmp_path):
    open_run(tmp_path, Config(), IDENTITY)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    before = contents(tmp_path)
    message = (
        r"out='.*' holds another run: data is \['a', 'b'\] there, \['c'\] here; "
        r"corpus_sha256 is 'abc' there, 'abd' here\. Choose another folder \(--out\), "
        r"the same settings to resume it, or --change"
    )
    other = Config(data=("c",))
    with pytest.raises(ValueError, match=message):
        open_run(tmp_path, other, {"corpus_sha256": "abd"})
    assert contents(tmp_path) == before


def test_run_that_never_began_gives_way_to_other_settings(tmp_path):
    """As after a start whose settings no engine could be made of."""
    open_run(tmp_path, Config(), IDENTITY)
    other = open_run(tmp_path, Config(data=("c",)), {"corpus_sha256": "abd"})
    assert other.record["config"]["data"] == ["c"]
    assert "history" not in other.record
    assert json.loads((tmp_path / "run.json").read_text()) == other.record


def test_other_run_goes_on_where_that_is_asked_for(tmp_path):
    open_run(tmp_path, Config(), IDENTITY)
    (tmp_path / "metrics.jsonl").touch()
    run = open_run(tmp_path, Config(data=("c",)), {"corpus_sha256": "abd"}, change=True)
    (line,) = run.record["history"]
    assert line["changed"] == {
        "data": [["a", "b"], ["c"]],
        "corpus_sha256": ["abc", "abd"],
    }
    assert run.record["config"]["data"] == ["c"]
    assert run.changes_since(0) == [line]
    assert run.changes_since(1) == []


def test_run_may_go_on_on_another_mesh(tmp_path):
    open_run(tmp_path, Config(), IDENTITY)
    (tmp_path / "metrics.jsonl").touch()
    before = contents(tmp_path)
    again = open_run(tmp_path, Config(mesh=MeshShape(data=4)), IDENTITY)
    assert again.record["config"]["mesh"]["data"] == 4
    assert contents(tmp_path) == before, "until an engine has agreed"


def test_steps_may_set_the_rate_of_a_config_that_does_not_say_otherwise(tmp_path):
    """As in a recipe of somebody's own: cosine over `steps`."""
    open_run(tmp_path, Config(), IDENTITY)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="holds another run: steps is 10 there, 20"):
        open_run(tmp_path, Config(steps=20), IDENTITY)


def test_setting_that_the_record_lacks_differs(tmp_path):
    open_run(tmp_path, Config(), {})
    (tmp_path / "metrics.jsonl").touch()
    message = "corpus_sha256 is None there, 'abc' here"
    with pytest.raises(ValueError, match=message):
        open_run(tmp_path, Config(), IDENTITY)


def test_folder_of_other_files_is_refused_and_nothing_lost(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    before = contents(tmp_path)
    message = (
        r"out='.*' has files but no run\.json, so it is not a jaxpar run\. Choose an "
        r"empty or a new folder \(--out\)"
    )
    with pytest.raises(ValueError, match=message):
        open_run(tmp_path, Config(), IDENTITY)
    assert contents(tmp_path) == before


def test_file_in_the_folders_place_is_refused(tmp_path):
    file = tmp_path / "out"
    file.write_text("mine")
    message = r"out='.*out' is a file\. Choose an empty or a new folder \(--out\)"
    with pytest.raises(ValueError, match=message):
        open_run(file, Config(), IDENTITY)
    assert file.read_text() == "mine"
