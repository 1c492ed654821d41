"""Are all pieces updated, each once, and what is read left as it was?"""

import threading
import time
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.offload import disk_pipeline
from jaxpar.offload.direct_io import allocate
from jaxpar.offload.disk_files import LeafOnDisk, Maps
from jaxpar.offload.disk_pipeline import DiskPiece, DiskPipeline, ranges
from jaxpar.offload.on_disk import OnDisk

ELEMENTS = 4096


def leaves(folder: Path, sizes: tuple[int, ...]) -> list[LeafOnDisk]:
    """Leaves of two arrays, in versions "old" and "new"; the old ones are 0, 1, ..."""
    mesh, dtype = make_mesh(MeshShape(), jax.devices()[:1]), np.dtype(np.float32)
    found = []
    for number, size in enumerate(sizes):
        arrays = (OnDisk((size,), dtype),) * 2
        leaf = LeafOnDisk(number, str(number), arrays, NamedSharding(mesh, P()))
        for name in ("old", "new"):
            (folder / name).mkdir(exist_ok=True)
            (shard,) = leaf.shards
            allocate(leaf.file(folder / name, shard), leaf.num_bytes(shard))
        for array in range(2):
            value = jax.device_put(np.arange(size, dtype=np.float32), leaf.sharding)
            leaf.put(folder / "old", array, value)
        found.append(leaf)
    return found


def pieces(found: list[LeafOnDisk], compute) -> list[DiskPiece]:
    return [
        DiskPiece(leaf, leaf.shards[0], start, stop, compute)
        for leaf in found
        for start, stop in ranges(leaf.arrays[0].shape[0], ELEMENTS)
    ]


def test_ranges_cover_the_elements() -> None:
    assert ranges(10_000, 5000) == [(0, 4096), (4096, 8192), (8192, 10_000)]
    assert ranges(10, 1) == [(0, 10)]
    assert ranges(0, 1) == []


def test_every_piece_is_updated_once_and_the_old_version_stays(tmp_path) -> None:
    found = leaves(tmp_path, (3 * ELEMENTS + 5, 7, 9 * ELEMENTS))

    def add(piece: DiskPiece, arrays: list[np.ndarray]) -> None:
        assert [x.size for x in arrays] == [piece.stop - piece.start] * 2
        arrays[0] += 1
        arrays[1] *= 2

    pipeline = DiskPipeline(2, ELEMENTS)
    for _ in range(2):  # From the old version, so the second run makes the same.
        pipeline.run(pieces(found, add), tmp_path / "old", tmp_path / "new")
    maps = Maps()
    for leaf in found:
        old = np.arange(leaf.arrays[0].shape[0], dtype=np.float32)
        for number, right in enumerate((old + 1, old * 2)):
            new = maps.array(tmp_path / "new", leaf, number)
            np.testing.assert_array_equal(new, right)
            kept = maps.array(tmp_path / "old", leaf, number)
            np.testing.assert_array_equal(kept, old)


def test_it_reads_computes_and_writes_at_once(tmp_path: Path) -> None:
    """With a disk and a host of equal speed in a third of the time of the sum."""
    found, wait = leaves(tmp_path, (12 * ELEMENTS,)), 0.02
    threads = set()

    def slow(*args: object) -> None:
        threads.add(threading.get_ident())
        time.sleep(wait)

    with (
        mock.patch.object(disk_pipeline, "read", slow),
        mock.patch.object(disk_pipeline, "write", slow),
    ):
        began = time.perf_counter()
        own = pieces(found, lambda piece, arrays: time.sleep(wait))
        DiskPipeline(2, ELEMENTS).run(own, tmp_path / "old", tmp_path / "new")
        took = time.perf_counter() - began
    in_turn = len(own) * 5 * wait
    assert len(threads) == 4
    assert took < 0.5 * in_turn


@pytest.mark.parametrize("call", ["read", "write", "sync"])
def test_an_error_of_the_disk_is_raised(call: str, tmp_path: Path) -> None:
    found = leaves(tmp_path, (8 * ELEMENTS,))
    pipeline, calls = DiskPipeline(2, ELEMENTS), []

    def fails(*args: object) -> None:
        calls.append(args)
        if len(calls) > 4 or call == "sync":
            raise OSError(5, "Input/output error")

    own = pieces(found, lambda piece, arrays: None)
    given = own, tmp_path / "old", tmp_path / "new"
    with (
        mock.patch.object(disk_pipeline, call, fails),
        pytest.raises(OSError, match="Input/output error"),
    ):
        pipeline.run(*given)
    pipeline.run(*given)
