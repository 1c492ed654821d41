"""Is a file of memory what the devices held, or nothing?"""

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar.checkpoint.memory_files import (
    START,
    MemoryRecord,
    NotHeldError,
    boxes_of,
    placed,
    read_arrays,
    read_kept,
    seal,
    write_shards,
)
from jaxpar.tree import stored_struct


def arrays(seed: int = 0) -> dict[str, jax.Array]:
    """Sharded over two axes, over one, and not at all; odd dtypes."""
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=4, tensor=2))

    def put(values: jax.Array, *axes: str | None) -> jax.Array:
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))

    key = jax.random.key(seed)
    return {
        "w": put(jax.random.normal(key, (8, 6)), "data", "tensor"),
        "v": put(jax.random.normal(key, (4, 3)).astype(jnp.bfloat16), "data"),
        "step": put(jnp.int32(seed)),
        "flags": put(jnp.asarray([True, False, True])),
        "small": put(jnp.asarray([1, -2, 3], jnp.int8)),
    }


def write(path: Path, seed: int = 0, step: int = 3) -> MemoryRecord:
    shards = write_shards(path, arrays(seed))
    seal(path, MemoryRecord(0, 1, step, "a", {"rows": 3}, {"x": 1}, shards))
    kept = read_kept(path)
    assert kept is not None
    return kept


def test_shards_come_back_to_the_bit(tmp_path: Path) -> None:
    kept = write(tmp_path / "file", 1)
    assert (kept.step, kept.data_state, kept.meta) == (3, {"rows": 3}, {"x": 1})
    wanted = arrays(1)
    assert [(x.leaf, x.box, x.dtype) for x in kept.shards] == boxes_of(wanted)
    assert len([x for x in kept.shards if x.leaf == "w"]) == 8
    assert len([x for x in kept.shards if x.leaf == "step"]) == 1, "one of its copies"
    found = read_arrays(tmp_path / "file", kept)
    for name, array in wanted.items():
        own = {box: x for (leaf, box), x in found.items() if leaf == name}
        again = placed(stored_struct(array), own)
        assert again.sharding == array.sharding
        assert np.asarray(again).tobytes() == np.asarray(array).tobytes(), name


def test_restored_arrays_outlive_the_next_copy(tmp_path: Path) -> None:
    """A device of a CPU could use the file's own bytes."""
    path, wanted = tmp_path / "file", arrays(1)
    kept = write(path, 1)
    found = read_arrays(path, kept)
    own = {box: x for (leaf, box), x in found.items() if leaf == "w"}
    again = placed(stored_struct(wanted["w"]), own)
    write(path, 2)
    assert np.asarray(again).tobytes() == np.asarray(wanted["w"]).tobytes()


def test_file_that_was_not_sealed_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, 1)
    write_shards(path, arrays(2))  # Written over, and killed before its end.
    assert read_kept(path) is None
    assert read_kept(tmp_path / "none") is None


def test_larger_state_that_was_not_written_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of the smaller one is still where it was."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "file"
    kept, one = write(path), {"step": arrays(7)["step"]}
    seal(path, dataclasses.replace(kept, shards=write_shards(path, one)))
    assert read_kept(path) is not None
    monkeypatch.setattr(os, "pwrite", killed)
    with pytest.raises(KeyboardInterrupt):
        write_shards(path, arrays(2))
    assert read_kept(path) is None


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "file"
    kept = write(path)
    whole, used = path.read_bytes(), set(range(40))
    for shard in kept.shards:
        used |= set(range(shard.start, shard.start + shard.num_bytes))
    table = max(x.start + x.num_bytes for x in kept.shards)
    used |= set(range(START + -(-(table - START) // 64) * 64, len(whole), 7))
    for place in sorted(used):
        changed = bytearray(whole)
        changed[place] ^= 16
        path.write_bytes(changed)
        found = read_kept(path)
        if found is not None:
            with pytest.raises(NotHeldError, match="has changed"):
                read_arrays(path, found)


def test_file_that_was_cut_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        assert read_kept(path) is None


def test_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "file").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        write_shards(tmp_path / "file", arrays())
    assert (tmp_path / "precious").read_text() == "precious"


def test_smaller_state_leaves_nothing_of_a_larger_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path)
    kept = write(path, 2)
    one = {"step": arrays(7)["step"]}
    seal(path, dataclasses.replace(kept, shards=write_shards(path, one)))
    found = read_kept(path)
    assert found is not None
    assert [x.leaf for x in found.shards] == ["step"]
    assert len(path.read_bytes()) < 1000
