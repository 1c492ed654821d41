"""Which version of the state on disk is whole, and which may be overwritten?

Each step writes the version that is not the last whole one, and then renames one small
file, `state.json`, that says which is. So a process that is killed at any moment finds
the last whole step. What steps carry beside it, such as small leaves, is written with
every commit.
"""

import dataclasses
import fcntl
import gc
import itertools
import json
import os
import shutil
import weakref
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jaxpar.offload.direct_io import allocate, sync
from jaxpar.offload.disk_files import LeafOnDisk, Maps
from jaxpar.offload.disk_pipeline import DiskPiece, DiskPipeline

_COMMITTED = "state.json"

_KEPT = 2
"""Whole steps that are remembered: processes may be one commit apart."""


@dataclasses.dataclass(frozen=True)
class WholeStep:
    """A step whose state is on disk.

    Attributes:
      step: its number.
      version: the name of its version.
      rest: the name of the file with what steps carry beside.
      fixed: the name of the file with what steps don't change.
    """

    step: int
    version: str
    rest: str
    fixed: str


class DiskStore:
    """The state on disk of this process's devices; one process uses a folder at a time.

    Args:
      folder: where it is; made if it is not there.
      leaves: what is stored.

    Attributes:
      maps: the arrays over its files.
      current: the version of the state that steps carry now; None before there is one.
      generation: how often it was changed: a version's files are written again.

    Raises:
      ValueError: if another process uses the folder, or it has a state of other leaves.
      OSError: if it can't be made or the disk is full.
    """

    def __init__(self, folder: Path, leaves: Sequence[LeafOnDisk]):
        self.folder = folder / f"process-{jax.process_index()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        weakref.finalize(self, os.close, _locked(self.folder / "lock"))
        self.leaves, self.maps = tuple(leaves), Maps()
        self._layout = [_described(leaf) for leaf in self.leaves]
        self._beside: Mapping[str, Any] = {}
        self.whole = self._agreed(self._read())
        self._began = False
        # Initialised here, and not brought from a checkpoint.
        self._is_new = True
        self._committed: int | None = None
        self._fixed: str | None = None
        self.current: Path | None = None
        self.generation = 0
        self._filling: Path | None = None
        # Named on disk by a commit that failed, perhaps.
        self._doubtful: set[Path] = set()
        for number in range(2):
            self._allocate(self.folder / f"v{number}")

    def _read(self) -> tuple[WholeStep, ...]:
        """The last whole steps, the newest last."""
        try:
            found = json.loads((self.folder / _COMMITTED).read_text())
        except FileNotFoundError:
            return ()
        except ValueError as error:
            raise ValueError(
                f"offload: path: {self.folder / _COMMITTED} is not JSON ({error}); "
                "delete the folder, and go on from a checkpoint."
            ) from error
        if found["layout"] != self._layout:
            newest = max((step["step"] for step in found["steps"]), default=0)
            raise ValueError(
                f"offload: path={str(self.folder.parent)!r} has step {newest} of "
                "another model, optimizer, mesh or ZeRO stage. Give another path, or "
                "delete it; checkpoints go between meshes."
            )
        self._beside = found["beside"]
        return tuple(WholeStep(**step) for step in found["steps"])

    def _agreed(self, own: tuple[WholeStep, ...]) -> tuple[WholeStep, ...]:
        """Of these the newest that every process has; no other is there from now on.

        Processes that are killed together may be one commit apart. What is newer than
        the common step would be overwritten while `state.json` says that it is whole.
        """
        steps = np.full(_KEPT, -1, np.int64)
        steps[: len(own)] = [each.step for each in own]
        by_process = np.atleast_2d(process_allgather(steps))
        common = set.intersection(*(set(row[row >= 0].tolist()) for row in by_process))
        agreed = tuple(step for step in own if step.step in common)[-1:]
        if agreed != own[-1:]:
            self._write_whole(agreed)
        return agreed

    def _write_whole(self, steps: Sequence[WholeStep]) -> None:
        found = [dataclasses.asdict(each) for each in steps]
        said = {"layout": self._layout, "beside": self._beside, "steps": found}
        text = json.dumps(said)
        _replace(self.folder / _COMMITTED, text.encode())

    def version(self, step: WholeStep) -> Path:
        """The folder of a whole step's version."""
        return self.folder / step.version

    def free_version(self) -> Path:
        """A version that may be overwritten; its files have room on the disk."""
        kept = {self.version(step) for step in self.whole[-1:]}
        kept |= self.maps.versions_in_use() | self._doubtful | {self.current}
        names = (self.folder / f"v{number}" for number in itertools.count())
        free = next(name for name in names if name not in kept)
        self._allocate(free)
        return free

    def _allocate(self, version: Path) -> None:
        version.mkdir(exist_ok=True)
        for leaf in self.leaves:
            for shard in leaf.shards:
                file, size = leaf.file(version, shard), leaf.num_bytes(shard)
                if not file.exists() or file.stat().st_size != size:
                    allocate(file, size)

    @property
    def current_version(self) -> Path:
        """The folder of the current version."""
        assert self.current is not None, "a state was adopted"
        return self.current

    def array(self, leaf: int, number: int) -> jax.Array:
        """An array of the current version, by the numbers of its leaf and its own."""
        assert self.current is not None, "a state was adopted"
        return self.maps.array(self.current, self.leaves[leaf], number)

    def put(self, leaf: int, number: int, array: jax.Array) -> jax.Array:
        """Write an array of a state that is made leaf by leaf; return its map."""
        if self._filling is None:
            self._filling = self.free_version()
        self.leaves[leaf].put(self._filling, number, array)
        return self.maps.array(self._filling, self.leaves[leaf], number)

    def adopt(self, arrays: Mapping[tuple[int, int], jax.Array]) -> None:
        """Make arrays the state that steps carry: write them, unless they are there.

        Args:
          arrays: (number of a leaf, number of its array) -> the array.
        """
        self._fixed = self._committed = None
        found = {key: self.maps.find(array) for key, array in arrays.items()}
        self._is_new &= any(found.values())
        versions = {place and place[0] for place in found.values()}
        there = all(place and place[1:] == key for key, place in found.items())
        if there and len(versions) == 1:
            self._go_on_with(versions.pop())
            self._filling = None
            return
        version = self.free_version()
        for (leaf, number), array in arrays.items():
            self.leaves[leaf].put(version, number, array)
        self._go_on_with(version)
        self._filling = None

    def _go_on_with(self, version: Path | None) -> None:
        self.current = version
        self.generation += 1

    def update(self, pieces: Sequence[DiskPiece], pipeline: DiskPipeline) -> None:
        """Update all pieces of the current version; what is written is the next one."""
        assert self.current is not None, "a state was adopted"
        target = self.free_version()
        pipeline.run(pieces, self.current, target)
        self._go_on_with(target)
        self._committed = None

    def is_committed(self, step: int) -> bool:
        """Whether the current version is that of the last whole step, this one."""
        return self._committed == step and self.current == self.version(self.whole[-1])

    def commit(
        self,
        step: int,
        rest: Mapping[str, np.ndarray],
        fixed: Callable[[], tuple[Mapping[str, np.ndarray], Mapping[str, Any]]],
    ) -> None:
        """Make the current version the last whole step.

        Args:
          step: its number.
          rest: names -> bytes of what steps carry beside it.
          fixed: returns the same of what they don't change, and JSON that says which
            leaves all of these are, as another run must have them; called once for a
            state, for it may be large.

        Raises:
          ValueError: if the first commit would end a run that was not resumed.
          OSError: if the disk fails; the last whole step is the one before, and the
            same commit may be tried again.
        """
        assert self.current is not None, "a state was adopted"
        self._check_first(step)
        number = 1 + max([-1, *(int(x.rest.split("-")[1]) for x in self.whole)])
        _write(self.folder / f"rest-{number}", rest)
        kept = self._fixed
        if kept is None:
            kept = f"fixed-{number}"
            arrays, self._beside = fixed()
            _write(self.folder / kept, arrays)
        new = WholeStep(step, self.current.name, f"rest-{number}", kept)
        whole = (*self.whole, new)[-_KEPT:] if self._began else (new,)
        self._doubtful.add(self.current)
        self._write_whole(whole)
        self._doubtful.clear()
        self.whole, self._fixed = whole, kept
        self._began, self._committed = True, step
        self._remove_aged()

    def _check_first(self, step: int) -> None:
        """Refuse to write step 0 over an earlier run's last step."""
        last = self.whole[-1].step if self.whole else 0
        if self._began or not self._is_new or step or not last:
            return
        raise ValueError(
            f"offload: path={str(self.folder.parent)!r} has step "
            f"{last} of an earlier run, which the first step would "
            "overwrite: call engine.resume() to go on from it, give another path, or "
            "delete the folder."
        )

    def begin_from(self, step: WholeStep) -> None:
        """Go on from a whole step: it is the current version."""
        self._go_on_with(self.version(step))
        self.whole, self._began = (step,), True
        self._committed, self._fixed = step.step, step.fixed

    def read_rest(
        self, step: WholeStep, beside: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """What `commit` got of both kinds.

        Raises:
          ValueError: if it was of other leaves, which it names, or a file is damaged.
        """
        names = [*self._beside, *(beside.keys() - self._beside.keys())]
        wrong = [n for n in names if self._beside.get(n) != beside.get(n)]
        if wrong:
            raise ValueError(
                f"offload: path={str(self.folder.parent)!r} has step {step.step} of "
                "another model, optimizer, mesh or ZeRO stage: "
                f"{', '.join(wrong[:3])} differ. Give another path, or delete it; "
                "checkpoints go between meshes."
            )
        found: dict[str, np.ndarray] = {}
        for file in (self.folder / step.fixed, self.folder / step.rest):
            try:
                with np.load(file) as stored:
                    found |= dict(stored)
            except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
                raise ValueError(
                    f"offload: path: {file} is damaged ({error}); go on from a "
                    "checkpoint, with another path."
                ) from error
        return found

    def _remove_aged(self) -> None:
        """Remove what no whole step and no array needs; two versions stay."""
        used = {name for x in self.whole for name in (x.rest, x.fixed)}
        for kind in ("rest-*", "fixed-*"):
            for file in self.folder.glob(kind):
                if file.name not in used:
                    file.unlink()
        needed = self.maps.versions_in_use() | {self.version(x) for x in self.whole}
        for folder in self.folder.glob("v*"):
            if int(folder.name[1:]) > 1 and folder not in needed:
                shutil.rmtree(folder)


def _described(leaf: LeafOnDisk) -> dict[str, Any]:
    """What two runs must agree on to share a leaf's files."""
    index = leaf.sharding.addressable_devices_indices_map(leaf.arrays[0].shape)
    return {
        "name": leaf.name,
        "shape": list(leaf.arrays[0].shape),
        "dtypes": [str(array.dtype) for array in leaf.stored],
        "shards": [str(place) for place in index.values()],
    }


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    named: dict[str, Any] = dict(arrays)
    with path.open("wb") as file:
        np.savez(file, **named)
    sync(path)


def _replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(data)
    sync(new)
    new.rename(path)
    sync(path.parent)


def _locked(path: Path) -> int:
    """Lock a file for as long as it is open; return its number.

    Raises:
      ValueError: if another one holds it.
    """
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    for collects in (gc.collect, None):  # An engine here that nobody uses any more.
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return number
        except BlockingIOError:
            if collects:
                collects()
    os.close(number)
    raise ValueError(
        f"offload: path: another engine uses {str(path.parent)!r}; end it, or give "
        "another path."
    )
