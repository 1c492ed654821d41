"""Is a run whose checkpoints are in a bucket the run that it is in a folder?"""

import dataclasses
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxpar
from jaxpar.checkpoint import Checkpoints, SaveFailedError
from jaxpar.checkpoint.bucket import BucketStep
from jaxpar.launch.lease import LeaseLostError
from jaxpar.show.run_data import read_run
from jaxpar.training.loop import train
from jaxpar.training.opening import open_run
from jaxpar.training.options import StartOptions
from jaxpar.training.signals import RunStopped
from tests.cli.test_main import called
from tests.object_server import BUCKET, Server, serving
from tests.runs import RULES, Data, bits, fresh, go, losses, terminate

STEPS, EVERY = 12, 4


@dataclasses.dataclass(frozen=True)
class Config(StartOptions):
    name: str = "a"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def url(server: Server) -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def run_in(folder: Path, data: Data, **options: Any) -> list[bytes]:
    """Train, and say what is in the state at the end."""
    engine = fresh()
    run = open_run(folder, Config(**options), {})
    train(engine, data, run, steps=STEPS, save_every=EVERY, recovery=RULES)
    return bits(engine)


def test_stopped_run_goes_on_from_a_bucket_and_ends_equal(
    url: str, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = fresh()
    go(engine, Data(), tmp_path / "folder", steps=STEPS, save_every=EVERY)
    out = tmp_path / "run"
    with pytest.raises(RunStopped):
        run_in(out, Data(calls={6: terminate}), checkpoint_url=url)
    assert json.loads((out / "run.json").read_text())["checkpoint_url"] == url
    assert not (out / "checkpoints").exists()
    # The record has the bucket: it need not be given again.
    assert run_in(out, Data()) == bits(engine)
    assert losses(out) == losses(tmp_path / "folder")
    assert Checkpoints(url).steps() == [7, 8, 12]
    assert [each.step for each in read_run(out).saved] == Checkpoints(url).steps()

    for place in (str(out), url):
        listed = called(capsys, "ckpt", "ls", place, "--verify")
        assert listed.count("verified now") == 3
        assert "step 12 of run" in called(capsys, "ckpt", "inspect", place)
    files = tmp_path / "files"
    called(capsys, "ckpt", "export", url, str(files))
    assert (
        load_file(files / "model.safetensors")["embed.embedding"].tobytes()
        == np.asarray(engine.state.params["embed"]["embedding"]).tobytes()
    )
    key = next(
        each
        for each in server.keys(url.removeprefix(f"s3://{BUCKET}/"))
        if "step_00000012/arrays." in each and each.endswith("/0.0")
    )
    altered = bytearray(server.ask(key))
    altered[-1] ^= 1
    server.ask(key, "PUT", bytes(altered))
    with pytest.raises(SystemExit):
        called(capsys, "ckpt", "verify", str(out))
    assert "step_00000012' is damaged" in capsys.readouterr().out


def test_other_run_begins_with_parameters_in_a_bucket(url: str, tmp_path: Path) -> None:
    first = tmp_path / "first"
    run_in(first, Data(), checkpoint_url=url)
    saved = [x.tobytes() for x in parameters(fresh(), restored=url)]
    for name, origin in (("url", url), ("folder", str(first))):
        engine = fresh()
        open_run(tmp_path / name, Config(init_from=origin), {}).begin(engine)
        assert [x.tobytes() for x in parameters(engine)] == saved
        assert engine.steps == 0


def parameters(engine: jaxpar.Engine, restored: str | None = None) -> list[np.ndarray]:
    if restored:
        engine.restore(restored)
    return [np.asarray(x) for x in jax.tree.leaves(engine.state.params)]


def test_lost_record_comes_back_from_the_bucket(url: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    whole = run_in(out, Data(), checkpoint_url=url)
    (out / "run.json").unlink()
    assert run_in(out, Data(), checkpoint_url=url) == whole
    found = json.loads((out / "run.json").read_text())
    assert (found["checkpoint_url"], found["config"]) == (url, {"name": "a"})


def test_what_is_not_this_runs_is_refused(url: str, tmp_path: Path) -> None:
    run_in(tmp_path / "run", Data(), checkpoint_url=url)
    refusals = [
        ("run", {"checkpoint_url": f"{url}/other"}, "has its checkpoints in 's3://"),
        (
            "new",
            {"checkpoint_url": url, "name": "b"},
            "checkpoint_url='s3://.* another run",
        ),
        (
            "new",
            {"checkpoint_url": "some/folder"},
            "must be a folder of a bucket.*--out",
        ),
        ("new", {"checkpoint_url": "ftp://x/y"}, "must be a folder of a bucket"),
        ("new", {"init_from": f"{url}/none"}, "has no parameters"),
    ]
    for name, options, why in refusals:
        with pytest.raises((ValueError, FileNotFoundError), match=why):
            open_run(tmp_path / name, Config(**options), {})
    assert not (tmp_path / "new" / "run.json").exists()


def test_checkpoints_without_a_run_are_no_place_for_one(
    url: str, tmp_path: Path
) -> None:
    engine = fresh()
    engine.save(url)
    engine.wait()
    with pytest.raises(ValueError, match="has checkpoints that no run has saved"):
        open_run(tmp_path / "new", Config(checkpoint_url=url), {})


def test_process_that_has_lost_the_run_commits_nothing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loses the run while its objects are written."""
    engine, data = fresh(), Data()
    run = open_run(tmp_path / "run", Config(checkpoint_url=url), {})
    engine.save(run.checkpoints)
    engine.wait()
    engine.step(next(data))

    def compare(*_: Any) -> None:
        (run.folder / "lease.2").write_text((run.folder / "lease.1").read_text())

    monkeypatch.setattr(BucketStep, "compare", compare)
    engine.save(run.checkpoints)
    with pytest.raises((LeaseLostError, SaveFailedError), match="was taken over"):
        engine.wait()
    assert Checkpoints(url).steps() == [0]
