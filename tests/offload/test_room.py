"""Is a state that the host can't hold refused, with the numbers?"""

import resource
from pathlib import Path

import jax
import optax
import pytest

import jaxpar
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.offload import room, streamed_optimizer
from jaxpar.offload.room import CGROUP, MEMINFO, check_room, free_bytes
from tests.equivalence.perceptron import make_engine


def files(folder: Path, available_kb: int, limit: str = "max", used: int = 0) -> tuple:
    (folder / "meminfo").write_text(
        f"MemTotal:  99 kB\nMemAvailable:  {available_kb} kB\n"
    )
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    return folder / "meminfo", folder


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [("max", 0, 2048), ("1500", 500, 1000), ("99999", 0, 2048), ("100", 500, 0)],
)
def test_the_smaller_of_memory_and_limit_is_free(limit, used, free, tmp_path) -> None:
    assert free_bytes(*files(tmp_path, 2, limit, used)) == free


def test_limits_of_the_first_version_of_control_groups_count(tmp_path: Path) -> None:
    given = files(tmp_path, 2)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1500\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("600\n")
    assert free_bytes(*given) == 900


def test_what_is_not_known_is_not_checked(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "none", tmp_path) is None
    mesh = make_mesh(MeshShape(), jax.devices()[:2])
    check_room(10**18, mesh, tmp_path / "none", tmp_path)


def test_this_machine_says_what_is_free() -> None:
    free = free_bytes(MEMINFO, CGROUP)
    assert free is not None
    assert 1e8 < free < 1e14


def test_all_devices_of_the_process_count(tmp_path: Path) -> None:
    mesh = make_mesh(MeshShape(), jax.devices()[:4])
    where = files(tmp_path, 4_000_000)
    check_room(10**9, mesh, *where)
    said = r"8\.0 GB of state \(4 x 2\.0 GB\) must fit .* of which 4\.1 GB are free"
    with pytest.raises(ValueError, match=said):
        check_room(2 * 10**9, mesh, *where)


def test_it_is_refused_before_anything_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    meminfo, cgroup = files(tmp_path, 4)
    monkeypatch.setattr(streamed_optimizer, "MEMINFO", meminfo)
    monkeypatch.setattr(streamed_optimizer, "CGROUP", cgroup)
    with pytest.raises(ValueError, match="must fit into this host's memory"):
        make_engine(optax.adam(0.1), 4, 2, 0, offload=jaxpar.Offload(piece_mb=0.001))
    assert compiled == []


def test_what_bounds_pinned_memory_is_named(tmp_path: Path, monkeypatch) -> None:
    for number in range(2):
        (tmp_path / f"node{number}").mkdir()
    monkeypatch.setattr(room, "NODES", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 20, 64 << 20))
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    said = "`ulimit -l` lets a process pin 0.067 GB, unless root; it has 2 NUMA nodes"
    with pytest.raises(ValueError, match=said):
        check_room(10**15, mesh, MEMINFO, CGROUP)
