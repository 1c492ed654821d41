"""Is a save asynchronous, safe from what follows it, and never at another's cost?"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint import Checkpoints, Keep, saving, slices
from jaxpar.checkpoint import folder as files
from jaxpar.checkpoint import outcome as outcomes
from jaxpar.checkpoint.arrays import Writer
from jaxpar.checkpoint.leaves import leaf_specs
from jaxpar.checkpoint.manifest import Manifest
from jaxpar.checkpoint.outcome import SaveOutcome
from tests.checkpoint.saves import save
from tests.checkpoint.test_outcome import Service

Tree = dict[str, Any]
Bits = Callable[[Any], list[bytes]]


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (None, [1, 3, 4])])
def test_keep_leaves_the_newest(
    keep: int | None, left: list[int], folder: Path, tree: Tree
) -> None:
    checkpoints = Checkpoints(folder, keep=keep)
    for step in (1, 3, 4):
        checkpoints.save(step, tree)
    checkpoints.wait()
    assert checkpoints.steps() == left
    assert len(list(folder.iterdir())) == len(left)
    checkpoints.close()


@pytest.mark.parametrize("is_sound", [True, False])
def test_step_before_goes_once_all_processes_have_compared(
    is_sound: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else keep=1 leaves nothing to go back to when another one finds damage."""
    for module in (outcomes, saving):
        monkeypatch.setattr(module, "_POLL_SECONDS", 0.005)
    value = {"w": jnp.arange(3000.0)}
    save(folder, 1, tree=value)
    own = slices.checksums(value)
    wrong = {"w": slices.Slices(own["w"].shape, {"0": "0" * 32})}
    manifest = Manifest(
        2, "run", leaf_specs(value), [None] * 2, {}, None, {}, slices=own
    )
    written, writer, service = files.saving_path(folder, 2), Writer(), Service()
    written.mkdir()
    first, second = (SaveOutcome(0, 2, service, (i, 2)) for i in range(2))
    writer.start(written, value, SaveOutcome(1, 2, service, (0, 1)))
    threads = []
    for outcome, held in ((first, own), (second, own if is_sound else wrong)):
        read_back = saving.ReadBack(held, 1.0, 0)
        given = outcome, written, writer, manifest, Keep(1), read_back
        finish = functools.partial(saving.finish, *given)
        threads.append(saving.start(outcome, lambda: None, finish))
    failed = [thread.exception(30) is not None for thread in threads]
    assert failed == [not is_sound] * 2
    assert list(files.complete_steps(folder)) == ([2] if is_sound else [2, 1])
    for outcome in (first, second):
        outcome.close()
    writer.close()


def test_keep_counts_checkpoints_of_earlier_processes(folder: Path, tree: Tree) -> None:
    save(folder, 1, 2, tree=tree)
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.restore(tree)
    checkpoints.save(3, tree)
    checkpoints.close()
    assert checkpoints.steps() == [2, 3]


def test_save_returns_before_the_disk_and_wait_after(
    folder: Path, tree: Tree, disk: Any
) -> None:
    checkpoints = Checkpoints(folder)
    disk.release.clear()
    checkpoints.save(1, tree)
    assert checkpoints.latest() is None
    disk.release.set()
    checkpoints.wait()
    assert checkpoints.latest() == 1
    checkpoints.close()


def test_arrays_may_be_donated_and_deleted_after_save(
    folder: Path, mesh: Mesh, bits: Bits
) -> None:
    sharding = NamedSharding(mesh, P("data"))
    names = ("deleted", "donated")
    values = {name: np.full((1024, 1024), 3, np.float32) for name in names}
    # Arrays that lend NumPy their memory, or borrow it, can't be donated.
    make = jax.jit(lambda: jnp.full((1024, 1024), 3.0), out_shardings=sharding)
    tree = {name: make() for name in names}
    overwrite = jax.jit(lambda x: x * 0 - 7, donate_argnums=0)
    overwrite.lower(tree["donated"]).compile()
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree)
    tree["deleted"].delete()
    value = overwrite(tree.pop("donated"))
    for _ in range(10):
        value = overwrite(value)
    target = dict.fromkeys(
        names, jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=sharding)
    )
    assert bits(checkpoints.restore(target).tree) == bits(values)
    checkpoints.close()


def test_a_failed_save_raises_once_and_leaves_the_rest(
    folder: Path,
    tree: Tree,
    disk: Any,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree)
    checkpoints.wait()
    disk.full = True
    checkpoints.save(2, tree)
    with pytest.raises(OSError, match=r"No space left.* is step 1; make room"):
        checkpoints.wait()
    checkpoints.wait()
    disk.full = False
    checkpoints.save(2, tree)
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]
    assert sorted(os.listdir(folder)) == ["step_00000001", "step_00000002"]
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
