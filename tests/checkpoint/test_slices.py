"""Is every slice compared with what the devices held, onto any sharding?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar.checkpoint import (
    Checkpoints,
    DamagedError,
    SaveFailedError,
    arrays,
    restoring,
    saving,
)
from jaxpar.checkpoint import folder as files
from jaxpar.checkpoint.manifest import Manifest
from jaxpar.checkpoint.places import FolderStep
from jaxpar.checkpoint.slices import (
    Box,
    DifferentError,
    Slices,
    checksums,
    read_compared,
)

WHOLE = np.arange(8 * 12.0, dtype=np.float32).reshape(8, 12)
SPECS = [
    PartitionSpec(),
    PartitionSpec("data"),
    PartitionSpec(None, "tensor"),
    PartitionSpec("tensor", "data"),
    PartitionSpec(("data", "tensor")),
]


def sharding(spec: PartitionSpec) -> NamedSharding:
    shape = jaxpar.MeshShape(data=4, tensor=2)
    return NamedSharding(jaxpar.make_mesh(shape, jax.devices()[:8]), spec)


def struct(spec: PartitionSpec, like: Any = WHOLE) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding(spec))


def reading(array: np.ndarray, seen: list[Box]) -> Callable[[str, Box], np.ndarray]:
    def read(name: str, box: Box) -> np.ndarray:
        assert name == "w"
        seen.append(box)
        return np.array(array[tuple(slice(*each) for each in box)])

    return read


@pytest.mark.parametrize("there", SPECS, ids=str)
@pytest.mark.parametrize("here", SPECS, ids=str)
def test_each_slice_is_read_once_and_cut_to_any_sharding(
    there: PartitionSpec, here: PartitionSpec
) -> None:
    slices = checksums({"w": jax.device_put(WHOLE, sharding(there))})
    seen: list[Box] = []
    given = {"w": struct(here)}, slices, reading(WHOLE, seen)
    found = read_compared(*given, in_flight=100)["w"]
    np.testing.assert_array_equal(found, WHOLE)
    assert found.sharding == sharding(here)
    assert len(seen) == len(set(seen)) == len(slices["w"].checksums)


@pytest.mark.parametrize("here", SPECS, ids=str)
def test_bit_that_has_changed_is_found_and_its_slice_named(here: PartitionSpec) -> None:
    slices = checksums({"w": jax.device_put(WHOLE, sharding(PartitionSpec("data")))})
    other = WHOLE.copy()
    other.view(np.uint32)[5, 11] ^= 1
    with pytest.raises(DifferentError, match=r"w\[4:6, 0:12\] is not what the devices"):
        read_compared({"w": struct(here)}, slices, reading(other, []), in_flight=1)


@pytest.mark.parametrize(
    "array",
    [jnp.float32(3), jnp.arange(5) > 2, jnp.ones((2, 3), jnp.bfloat16)],
    ids=lambda x: str(x.dtype),
)
def test_scalars_and_other_dtypes_have_checksums(array: jax.Array) -> None:
    slices = checksums({"w": array})
    target = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
    read = reading(np.asarray(array), [])
    found = read_compared({"w": target}, slices, read, in_flight=1)["w"]
    np.testing.assert_array_equal(found, array)
    assert slices["w"].shape == array.shape


def test_array_without_checksums_is_read_as_it_is_stored_here() -> None:
    seen: list[Box] = []
    given = {"w": struct(PartitionSpec("data"))}, {}, reading(WHOLE, seen)
    np.testing.assert_array_equal(read_compared(*given, in_flight=1)["w"], WHOLE)
    assert sorted(seen) == [((n, n + 2), (0, 12)) for n in (0, 2, 4, 6)]


def test_slices_know_where_they_are() -> None:
    boxes = dict(Slices((2, 3), {}).boxes((4, 3)))
    assert boxes == {"0.0": ((0, 2), (0, 3)), "1.0": ((2, 4), (0, 3))}


def alter(step: Path) -> None:
    """Change a byte of the array in a step's folder."""
    content = np.arange(3000.0, dtype=np.float32).tobytes()
    for path in (p for p in (step / "arrays").rglob("*") if p.is_file()):
        whole = path.read_bytes()
        if content in whole:
            at = whole.index(content) + 1000
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            return
    pytest.fail("no file has the array's bytes")


def tree(step: int) -> dict[str, jax.Array]:
    return {"w": jnp.arange(3000.0), "step": jnp.int32(step)}


def save(folder: Path, steps: range) -> None:
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(step, tree(step))
    checkpoints.close()


def test_byte_that_changes_between_the_write_and_the_seal_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files' checksums are then of the wrong byte."""
    save(tmp_path, range(1, 2))
    real = saving.seal_together

    def seal_together(outcome: Any, folder: Path) -> Any:
        alter(folder)
        return real(outcome, folder)

    monkeypatch.setattr(saving, "seal_together", seal_together)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.restore(tree(0))
    checkpoints.save(2, tree(2))
    checkpoints.close()
    assert files.choose(tmp_path, None)["step"] == 2
    with pytest.raises(DamagedError, match=r"w\[0:3000\] is not what the devices held"):
        Checkpoints(tmp_path).restore(tree(0), step=2)
    with pytest.warns(UserWarning, match=r"w\[0:3000\].*restoring step 1"):
        found = Checkpoints(tmp_path).restore(tree(0))
    assert int(found.tree["step"]) == found.step == 1


def test_large_files_are_compared_when_they_are_read_alone(tmp_path: Path) -> None:
    """A restore reads them once."""
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"w": jnp.full(1 << 19, float(step))})
    checkpoints.close()
    step = files.step_path(tmp_path, 2)
    large = max(step.rglob("*"), key=lambda path: path.stat().st_size)
    assert large.stat().st_size > 2 << 20
    whole = bytearray(large.read_bytes())
    whole[len(whole) // 2] ^= 1
    large.write_bytes(whole)
    assert files.choose(tmp_path, None)["step"] == 2
    with pytest.raises(DamagedError, match=f"{large.name}: another checksum"):
        files.verified(step, 2)
    with pytest.warns(UserWarning, match=r"w\[0:524288\].*restoring step 1"):
        found = Checkpoints(tmp_path).restore({"w": jnp.zeros(1 << 19)})
    assert float(found.tree["w"][0]) == 1


def test_byte_that_changes_between_the_check_and_the_read_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, range(1, 3))
    real = restoring.load

    def load(step: FolderStep, *given: Any) -> Any:
        if step.name.endswith("2"):
            alter(step.path)
        return real(step, *given)

    monkeypatch.setattr(restoring, "load", load)
    with pytest.warns(UserWarning, match=r"w\[0:3000\].*restoring step 1"):
        found = Checkpoints(tmp_path).restore(tree(0))
    assert int(found.tree["step"]) == found.step == 1
    np.testing.assert_array_equal(found.tree["w"], jnp.arange(3000.0))


def alter_when_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte changes once Orbax has written it, before anything reads it back."""
    real = arrays.Writer.wait

    def wait(self: Any) -> None:
        real(self)
        alter(next(folder for folder in self.seen))

    def start(self: Any, folder: Path, *given: Any) -> None:
        self.seen = [folder]
        begin(self, folder, *given)

    begin = arrays.Writer.start
    monkeypatch.setattr(arrays.Writer, "start", start)
    monkeypatch.setattr(arrays.Writer, "wait", wait)


def test_what_is_read_back_and_differs_is_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, range(1, 2))
    alter_when_written(monkeypatch)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.set_rules(3, 1.0)
    checkpoints.restore(tree(0))
    checkpoints.save(2, tree(2))
    with pytest.raises(SaveFailedError, match=r"w\[0:3000\] is not what the devices"):
        checkpoints.wait()
    assert checkpoints.steps() == [1]
    checkpoints.set_rules(3, 0.0)
    checkpoints.save(3, tree(3))
    checkpoints.close()
    assert checkpoints.steps() == [1, 3]


def test_saves_of_one_run_read_other_slices_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their steps."""
    read: list[str] = []

    def compared(folder: Path, manifest: Manifest, chosen: dict[str, Slices]) -> None:
        read.extend(name for name, each in chosen.items() if each.checksums)

    monkeypatch.setattr(arrays, "compare_slices", compared)
    checkpoints = Checkpoints(tmp_path)
    for step in range(8, 80, 8):
        checkpoints.save(step, {f"w{i}": jnp.float32(i) for i in range(8)})
    checkpoints.close()
    assert sorted(set(read)) == [f"w{i}" for i in range(8)]


def test_step_that_another_process_finds_damaged_is_not_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 0 has given it its name by then."""
    checkpoints, real = Checkpoints(tmp_path), saving.finish
    checkpoints.save(1, tree(1))
    checkpoints.wait()

    def finish(*given: Any) -> None:
        real(*given)
        raise DifferentError("w[0:3000] is not what the devices held")

    monkeypatch.setattr(saving, "finish", finish)
    checkpoints.save(2, tree(2))
    with pytest.raises(SaveFailedError, match="newest checkpoint there is step 1"):
        checkpoints.wait()
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="step_00000002"):
        checkpoints.save(2, tree(2))
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]


def test_device_without_room_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sound steps would be set aside, and an older one taken."""
    save(tmp_path, range(1, 3))

    def full(*_: Any) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", full)
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        checkpoints.restore(tree(0))
    assert checkpoints.steps() == [1, 2]


def test_every_slice_is_read_back_in_turn(tmp_path: Path) -> None:
    """With a share of an eighth, by eight saves in a row."""
    value = jnp.arange(3000.0)
    slices = checksums({f"w{i}": value for i in range(9)})
    read: list[str] = []

    def compared(folder: Path, manifest: Manifest, chosen: dict[str, Slices]) -> None:
        read.extend(name for name, each in chosen.items() if each.checksums)

    for turn in range(8):
        # Runs save at every so many steps, often a multiple of eight.
        manifest = Manifest(120 * turn, "", {}, [], {}, None, {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(arrays, "compare_slices", compared)
            saving.ReadBack(slices, 0.125, turn).compare(tmp_path, manifest)
    assert sorted(read) == [f"w{i}" for i in range(9)]


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_share_that_is_read_back_is_at_most_all(share: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"reread={share} must be from 0 to 1"):
        Checkpoints(tmp_path).set_rules(3, share)
