"""Is every damage to every file found, named, and gone round by the step before?"""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.checkpoint import Checkpoints, DamagedError
from jaxpar.checkpoint import folder as files


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps whose arrays differ, in more than one file."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    checkpoints = Checkpoints(folder)
    for step in (1, 2):
        keys = jax.random.split(jax.random.key(step), 3)
        tree = {f"leaf{i}": jax.random.normal(key, (50,)) for i, key in enumerate(keys)}
        checkpoints.save(step, {**tree, "step": jnp.int32(step)})
    checkpoints.close()
    return folder


def target() -> dict[str, Any]:
    return {f"leaf{i}": jnp.zeros(50) for i in range(3)} | {"step": jnp.int32(0)}


Trial = tuple[str, tuple[str, ...], Callable[[Path, Path], None]]


def trials(pristine: Path, bits: int) -> list[Trial]:
    """(damage, files, what does it), for every file of the newest step."""
    step = files.step_path(pristine, 2)
    found = sorted(p for p in step.rglob("*") if p.is_file())
    made = []
    for file in found:
        name = file.relative_to(step).as_posix()
        size = file.stat().st_size
        spread = [8 * size * k // bits + 3 * k for k in range(bits)]
        for bit in sorted({min(bit, 8 * size - 1) for bit in spread}):
            made.append((f"bit {bit}", (name,), lambda p, _, bit=bit: flip(p, bit)))
        made += [
            ("truncated", (name,), lambda p, _: truncate(p)),
            ("deleted", (name,), lambda p, _: p.unlink()),
            ("emptied", (name,), lambda p, _: os.truncate(p, 0)),
            ("grown", (name,), lambda p, _: p.write_bytes(p.read_bytes() + b"\0")),
            ("a link", (name,), lambda p, _: replace_by_link(p)),
        ]
    for one, other in itertools.pairwise(found):
        if one.read_bytes() != other.read_bytes():
            names = tuple(p.relative_to(step).as_posix() for p in (one, other))
            made.append(("swapped", names, lambda p, q: swap(p, q)))
    return made


def swap(one: Path, other: Path) -> None:
    mine, theirs = one.read_bytes(), other.read_bytes()
    one.write_bytes(theirs)
    other.write_bytes(mine)


@pytest.mark.parametrize(
    ("bits", "least"), [(1, 60), pytest.param(16, 200, marks=pytest.mark.slow)]
)
def test_every_damage_to_every_file_is_found_and_named(
    bits: int, least: int, pristine: Path, tmp_path: Path
) -> None:
    made = trials(pristine, bits)
    assert len(made) >= least
    for damage, names, do in made:
        folder = tmp_path / "damaged"
        shutil.copytree(pristine, folder)
        step = files.step_path(folder, 2)
        do(step / names[0], step / names[-1])
        with pytest.raises((DamagedError, FileNotFoundError)) as raised:
            files.choose(folder, 2)
        told = (*names, "has no manifest")
        assert any(name in str(raised.value) for name in told), (damage, names)
        found = files.choose(folder, None)
        assert found["step"] == 1
        ((number, why),) = found["skipped"]
        assert number == 2
        assert any(name in why for name in told)
        shutil.rmtree(folder)


@pytest.mark.parametrize("damage", [truncate, Path.unlink, replace_by_link])
def test_step_before_is_restored_and_the_file_named(
    damage: Callable[[Path], None], pristine: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(pristine, folder)
    file = next((files.step_path(folder, 2) / "arrays").rglob("d/*"))
    damage(file)
    with pytest.warns(UserWarning, match=rf"{file.name}: .*: restoring step 1"):
        restored = Checkpoints(folder).restore(target())
    assert (restored.step, int(restored.tree["step"])) == (1, 1)


def test_file_that_was_not_saved_is_damage(pristine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(pristine, folder)
    (files.step_path(folder, 2) / "arrays" / "more").write_text("x")
    with pytest.raises(DamagedError, match="arrays/more: is not a file of the step"):
        files.choose(folder, 2)


def test_step_under_another_number_is_damage(pristine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(pristine, folder)
    files.step_path(folder, 2).rename(files.step_path(folder, 3))
    with pytest.raises(DamagedError, match=r"manifest\.json: is of step 2"):
        files.choose(folder, 3)
    assert files.choose(folder, None)["step"] == 1


def test_unharmed_step_is_sound(pristine: Path) -> None:
    assert files.choose(pristine, None) == {"step": 2, "skipped": []}
    manifest = files.verified(files.step_path(pristine, 2), 2)
    assert manifest.num_bytes > 4 * 150
    assert all(name.startswith("arrays/") for name in manifest.files)


def test_run_goes_on_past_its_own_newest_step_that_lost_its_manifest(
    tmp_path: Path,
) -> None:
    """The save that follows sets it aside; the run does not end of it."""
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, target())
    checkpoints.wait()
    truncate(files.step_path(tmp_path, 2) / "manifest.json")
    with pytest.raises(DamagedError, match="manifest"):
        Checkpoints(tmp_path).save(3, target())  # Whose folder it is can't be told.
    with pytest.warns(UserWarning, match="step_00000002"):
        checkpoints.save(3, target())
    checkpoints.close()
    assert checkpoints.steps() == [1, 3]
    assert (tmp_path / "step_00000002.damaged").is_dir()
    assert files.choose(tmp_path, None) == {"step": 3, "skipped": []}
