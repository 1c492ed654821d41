"""Are layers read from their files, ahead of use, and gradients written by layer?"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.offload import layer_files
from jaxpar.offload.disk_files import LeafOnDisk
from jaxpar.offload.disk_store import DiskStore
from jaxpar.offload.layer_files import LayerFiles
from jaxpar.offload.on_disk import OnDisk

LAYERS, ROWS, WIDTH = 5, 8, 33
"""A layer is no multiple of a page."""


def made(folder: Path, copy: Any = None) -> tuple[LayerFiles, np.ndarray]:
    shape = jaxpar.MeshShape(replica=2, data=2)
    mesh = jaxpar.make_mesh(shape, jax.devices()[:4])
    whole = LAYERS, ROWS, WIDTH
    place = NamedSharding(mesh, P(None, "data"))
    arrays = (OnDisk(whole, np.dtype(np.float32)),) * 3
    leaf = LeafOnDisk(0, "w", arrays, place, copy and OnDisk(whole, np.dtype(copy)))
    store = DiskStore(folder, [leaf])
    values = np.random.default_rng(0).normal(size=whole).astype(np.float32)
    zeros = np.zeros_like(values)
    given = values, zeros, zeros
    store.adopt({(0, n): jax.device_put(x, place) for n, x in enumerate(given)})
    devices = list(mesh.devices.flat)
    return LayerFiles(leaf, devices, lambda: store, can_run=True), values


def layer_of(files: LayerFiles, position: int, layer: int) -> np.ndarray:
    found = files._read(np.asarray(position), np.asarray(layer))
    return np.asarray(found).reshape(ROWS // 2, WIDTH)


@pytest.mark.parametrize("copy", [None, jnp.bfloat16])
def test_each_device_reads_its_part_of_any_layer(copy, tmp_path) -> None:
    files, values = made(tmp_path, copy)
    right = values.astype(copy or np.float32)
    for layer in [*range(LAYERS), *reversed(range(LAYERS)), 3, 0]:
        for position in range(4):
            half = slice(None, 4) if position % 2 == 0 else slice(4, None)
            found = layer_of(files, position, layer)
            np.testing.assert_array_equal(found, right[layer, half])


def test_the_next_layer_is_read_ahead_in_both_directions(tmp_path, monkeypatch) -> None:
    files, _ = made(tmp_path)
    read, plain = [], layer_files.read

    def counted(path, offset, into):
        read.append(offset)
        plain(path, offset, into)

    monkeypatch.setattr(layer_files, "read", counted)
    size = ROWS // 2 * WIDTH * 4

    def ahead_of(layer: int) -> set[int]:
        layer_of(files, 0, layer)
        layer_files._pool().submit(int).result()
        for job in files._ahead[0]._jobs.values():
            job.result()
        return {offset // 4096 * 4096 for offset in read}

    for layers in (range(LAYERS), reversed(range(LAYERS))):
        for layer in layers:
            ahead_of(layer)
    # Each layer once a pass, the last one once for both; none after the first.
    firsts = [layer * size // 4096 * 4096 for layer in range(LAYERS)]
    assert sorted(read) == sorted([*firsts, *firsts[:-1]])


def test_gradients_are_written_by_layer_once_a_shard(tmp_path: Path) -> None:
    files, _ = made(tmp_path)
    files.dtype = np.dtype(np.float32)
    grads = np.random.default_rng(1).normal(size=(LAYERS, ROWS, WIDTH))
    grads = grads.astype(np.float32)
    for layer in range(LAYERS):
        for position in range(4):
            half = slice(None, 4) if position % 2 == 0 else slice(4, None)
            # Replicas have the same; only the first one's is written.
            own = grads[layer, half] + (position > 1)
            files._write(np.asarray(position), np.asarray(layer), own)
    for number, half in enumerate((slice(None, 4), slice(4, None))):
        stored = np.fromfile(files.grads[number], np.float32)
        right = grads[:, half].reshape(-1)
        np.testing.assert_array_equal(stored[: right.size], right)


def test_a_disk_that_fails_gives_nan_and_says_so_later(tmp_path: Path) -> None:
    files, _ = made(tmp_path)
    assert files.failure() is None
    version = files.store().current_version
    version.rename(version.with_name("away"))
    assert np.isnan(layer_of(files, 0, 0)).all()
    assert version.name in str(files.failure())
    assert files.failure() is None
    version.with_name("away").rename(version)
    assert not np.isnan(layer_of(files, 0, 0)).any()
