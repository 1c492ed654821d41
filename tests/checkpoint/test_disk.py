"""What do a full disk, a read-only one and a failing one cost: one save, no more?

The disks are real: small file systems in memory, which take a superuser to mount.
"""

import dataclasses
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpar.checkpoint import Checkpoints, SaveFailedError
from jaxpar.launch.exit_codes import SAVE_FAILED
from jaxpar.training.signals import RunStopped
from tests.runs import RULES, STEPS, Data, events, fresh, go, run_in


def mount(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *args], capture_output=True, text=True, check=False)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a small disk takes a superuser")
    done = mount("-t", "tmpfs", "-o", "size=4m", "small", str(folder))
    if done.returncode:
        pytest.skip(f"a small disk can't be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def tree(megabytes: float) -> dict[str, Any]:
    return {"w": jnp.arange(int(megabytes * 1e6) // 4, dtype=jnp.float32)}


def test_save_without_room_is_refused_before_anything_is_written(disk: Path) -> None:
    checkpoints = Checkpoints(disk / "run")
    checkpoints.save(1, tree(0.5))
    checkpoints.wait()
    before = sorted(disk.rglob("*"))
    free = shutil.disk_usage(disk).free
    with pytest.raises(OSError, match=rf"step 2 needs 6,048,576 bytes.*{free:,} are"):
        Checkpoints(disk / "other").save(2, tree(5))
    with pytest.raises(ValueError, match="another model or optimizer"):
        checkpoints.save(2, tree(5))
    assert [p for p in sorted(disk.rglob("*")) if p.name != "other"] == before
    assert Checkpoints(disk / "run").restore(tree(0.5)).step == 1


def test_disk_that_fills_while_a_save_is_written_costs_that_save(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(disk / "run")
    checkpoints.save(1, tree(1.5))
    checkpoints.wait()
    # As if another program took the room after it was looked for.
    (disk / "other").write_bytes(bytes(1_500_000))
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(disk)._replace(free=10**9)
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        checkpoints.save(2, tree(1.5))
        with pytest.raises(SaveFailedError, match="there is step 1; make room"):
            checkpoints.wait()
    assert sorted(p.name for p in (disk / "run").iterdir()) == ["step_00000001"]
    assert Checkpoints(disk / "run").restore(tree(1.5)).step == 1
    (disk / "other").unlink()
    checkpoints.save(2, tree(1.5))
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]


def test_read_only_disk_is_told_and_its_steps_load(disk: Path) -> None:
    checkpoints = Checkpoints(disk / "run")
    checkpoints.save(1, tree(0.5))
    checkpoints.close()
    assert mount("-o", "remount,ro", str(disk)).returncode == 0
    again = Checkpoints(disk / "run")
    assert again.restore(tree(0.5)).step == 1
    with pytest.raises(PermissionError, match=r"can't be written \(Read-only file sys"):
        again.save(2, tree(0.5))
    assert again.steps() == [1]


def test_run_on_a_disk_that_fills_stops_with_its_code_and_goes_on_with_room(
    disk: Path,
) -> None:
    with pytest.raises(RunStopped, match=r"needs [\d,]+ bytes .* are free") as stopped:
        go(fresh(), Data(), disk / "run", save_every=1, keep=None)
    assert stopped.value.code == SAVE_FAILED
    steps = Checkpoints(disk / "run" / "checkpoints").steps()
    assert 2 < len(steps) < STEPS
    assert run_in(disk / "run").resume(fresh()) == steps[-1]
    assert mount("-o", "remount,size=64m", str(disk)).returncode == 0
    go(fresh(), Data(), disk / "run", save_every=1, keep=None)
    assert Checkpoints(disk / "run" / "checkpoints").latest() == STEPS


def test_run_goes_on_without_saves_if_asked(disk: Path) -> None:
    rules = dataclasses.replace(RULES, on_failed_save="warn")
    engine = fresh()
    go(engine, Data(), disk / "run", save_every=1, keep=None, recovery=rules)
    assert int(engine.state.step) == STEPS
    failed = events(disk / "run", "save failed")
    steps = Checkpoints(disk / "run" / "checkpoints").steps()
    assert len(failed) + len(steps) == STEPS + 1
    assert all("are free" in event["why"] for event in failed)


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT])
def test_error_of_the_disk_while_syncing_costs_that_save(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, tree(0.1))
    checkpoints.wait()

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        checkpoints.save(2, tree(0.1))
        with pytest.raises(SaveFailedError, match=os.strerror(number)):
            checkpoints.wait()
    assert checkpoints.steps() == [1]
    checkpoints.save(2, tree(0.1))
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]
