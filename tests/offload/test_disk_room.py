"""Are folders that can't hold the state refused, with the remedy?"""

from pathlib import Path

import jax
import optax
import pytest

import jaxpar
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.offload.disk_room import MOUNTS, check_disk, file_system
from tests.equivalence.perceptron import make_engine


def mounts(folder: Path, *lines: str) -> Path:
    file = folder / "mounts"
    file.write_text("".join(f"{line} rw 0 0\n" for line in lines))
    return file


def test_the_innermost_mount_counts(tmp_path: Path) -> None:
    own = tmp_path.resolve()
    listed = mounts(tmp_path, "a / ext4", f"b {own} tmpfs", f"c {own}/in xfs")
    kinds = [file_system(path, listed) for path in (Path("/"), own, own / "in/x")]
    assert kinds == ["ext4", "tmpfs", "xfs"]
    assert file_system(own, tmp_path / "none") is None
    assert file_system(Path("/proc"), MOUNTS) == "proc"


def test_memory_is_no_disk(tmp_path: Path) -> None:
    mesh = make_mesh(MeshShape(), jax.devices()[:2])
    listed = mounts(tmp_path, "a / ext4", f"b {tmp_path.resolve()} tmpfs")
    with pytest.raises(ValueError, match="is on tmpfs, which is memory"):
        check_disk(1, mesh, tmp_path, listed)


def test_what_has_no_room_is_refused_with_the_numbers(tmp_path: Path) -> None:
    mesh = make_mesh(MeshShape(), jax.devices()[:2])
    with pytest.raises(ValueError, match=r"needs 2,000,000.0 GB for the versions"):
        check_disk(10**15, mesh, tmp_path)
    # What an earlier start of the run takes is free for it.
    check_disk(1000, mesh, tmp_path)


def test_a_folder_that_cant_be_made_is_refused_before_compiling(tmp_path) -> None:
    (tmp_path / "file").touch()
    offload = jaxpar.Offload(optimizer="disk", path=str(tmp_path / "file" / "x"))
    with pytest.raises(ValueError, match=r"offload: path='.*file/x' can't be made"):
        make_engine(optax.adamw(1e-2), 4, 2, 3, offload=offload)
