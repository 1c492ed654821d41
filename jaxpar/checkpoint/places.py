"""Where are a run's checkpoints: in a folder of a file system, or of a bucket?"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.checkpoint import arrays as stored_arrays
from jaxpar.checkpoint import bucket as buckets
from jaxpar.checkpoint import folder as files
from jaxpar.checkpoint import saving
from jaxpar.checkpoint.bucket import BucketFolder, BucketStep
from jaxpar.checkpoint.manifest import Manifest, read_manifest, sizes_differ
from jaxpar.checkpoint.outcome import SaveOutcome
from jaxpar.checkpoint.retention import Keep
from jaxpar.checkpoint.saving import ReadBack
from jaxpar.checkpoint.slices import Slices
from jaxpar.launch.lease import lease_of, require_lease
from jaxpar.launch.object_stores import as_url, is_url
from jaxpar.launch.own_files import retried

Work = tuple[Callable[[], None], Callable[[], None]]
"""What a save does at once, and in the background."""


@dataclasses.dataclass(frozen=True)
class FolderStep:
    """A step in a folder.

    Attributes:
      path: its folder.
    """

    path: Path

    @property
    def name(self) -> str:
        """Its name in the folder of the checkpoints."""
        return self.path.name

    def __str__(self) -> str:
        return str(self.path)

    def manifest(self) -> Manifest:
        """Read its manifest."""
        return read_manifest(self.path)

    def verify(self) -> Manifest:
        """As `jaxpar.checkpoint.folder.verified`."""
        return files.verified(self.path, files.step_of(self.name) or 0)

    def state(self, manifest: Manifest) -> str:
        """What is known of it without reading its arrays."""
        if sizes_differ(self.path, manifest):
            return "damaged: files are missing or have another size"
        return "verified when saved, sizes unchanged"

    def saved_at(self) -> float | None:
        """When it was saved, in seconds since 1970."""
        return self.path.stat().st_mtime

    def require_declared(self, manifest: Manifest) -> None:
        """As `jaxpar.checkpoint.arrays.require_declared`."""
        stored_arrays.require_declared(self.path, manifest.leaves)

    def read_whole(self, leaf: str, manifest: Manifest) -> np.ndarray:
        """As `jaxpar.checkpoint.arrays.read_whole`."""
        return stored_arrays.read_whole(self.path, leaf, manifest)

    def read_sharded(
        self,
        structs: Mapping[str, jax.ShapeDtypeStruct],
        slices: Mapping[str, Slices],
    ) -> dict[str, jax.Array]:
        """As `jaxpar.checkpoint.arrays.read_sharded`."""
        return stored_arrays.read_sharded(self.path, structs, slices)


class FolderPlace:
    """A folder of a file system, with a run's checkpoints.

    Args:
      folder: absolute.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: stored_arrays.Writer | None = None

    def __str__(self) -> str:
        return str(self._folder)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FolderPlace) and self._folder == other._folder

    def __hash__(self) -> int:
        return hash(self._folder)

    def lease(self) -> dict[str, int]:
        """The number of the lease that this process has of it, for a step's meta."""
        lease = lease_of(self._folder)
        return {"lease": lease.number} if lease else {}

    def require_own(self) -> None:
        """Check that no other process has taken the run over."""
        require_lease(self._folder)

    def steps(self) -> dict[int, bool]:
        """Each step, newest first -> whether it has a manifest."""
        found = files.step_folders(self._folder)
        return {step: files.is_complete(path) for step, path in found.items()}

    def complete(self) -> list[int]:
        """The steps that have a manifest, newest first."""
        return list(files.complete_steps(self._folder))

    def step(self, number: int) -> FolderStep:
        """A step, whether it exists or not."""
        return FolderStep(files.step_path(self._folder, number))

    def choose(self, step: int | None, damaged: Mapping[int, str]) -> dict[str, Any]:
        """As `jaxpar.checkpoint.folder.choose`."""
        return files.choose(self._folder, step, damaged)

    def unreadable_newest(self, known: Set[int]) -> set[int]:
        """As `jaxpar.checkpoint.folder.unreadable_newest`."""
        return files.unreadable_newest(self._folder, known)

    def prepare(
        self, step: int, count: int, needed: int, damaged: Iterable[int]
    ) -> tuple[str, str | None]:
        """Make room for a step, and make the folder that it is written to.

        Args:
          step: its number.
          count: of the save.
          needed: bytes of its arrays.
          damaged: steps known to be damaged, to set aside.

        Returns:
          What to warn of, or ""; and None, for there are no objects.
        """
        files.make_writable(self._folder)
        files.require_room(self._folder, step, needed)
        files.clean_up(self._folder)
        names = files.set_aside(self._folder, damaged)
        path = files.saving_path(self._folder, step, count)
        retried(lambda: path.mkdir(exist_ok=True), path)
        said = (
            f"damaged checkpoints in {str(self._folder)!r} were renamed to end in "
            f"'.damaged': {', '.join(names)}"
        )
        return (said if names else ""), None

    def save(
        self,
        outcome: SaveOutcome,
        count: int,
        held: Mapping[str, jax.Array],
        manifest: Manifest,
        keep: Keep,
        read_back: ReadBack,
    ) -> Work:
        """What saves a step that was prepared."""
        path = files.saving_path(self._folder, manifest.step, count)
        writer = self._writer = self._writer or stored_arrays.Writer()
        given = outcome, path, writer, manifest, keep, read_back
        begin = functools.partial(writer.start, path, held, outcome)
        return begin, functools.partial(saving.finish, *given)

    def close(self) -> None:
        """Release the threads that write."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


@dataclasses.dataclass(frozen=True)
class BucketPlace(BucketFolder):
    """A folder of a bucket.

    A lease is a file: a run's folder has it, elsewhere than its checkpoints.
    """

    def lease(self) -> dict[str, int]:
        """The number of the run's lease that this process has, for a step's meta."""
        lease = lease_of(self.url)
        return {"lease": lease.number} if lease else {}

    def require_own(self) -> None:
        """Check that no other process has taken the run over."""
        require_lease(self.url)

    def save(
        self,
        outcome: SaveOutcome,
        count: int,
        held: Mapping[str, jax.Array],
        manifest: Manifest,
        keep: Keep,
        read_back: ReadBack,
    ) -> Work:
        """What saves a step that was prepared."""
        del count  # Its objects have a name of their own.
        writer = buckets.ObjectWriter()
        step = BucketStep(self, manifest.step)
        given = outcome, step, writer, manifest, keep, read_back
        begin = functools.partial(writer.start, held)
        return begin, functools.partial(buckets.finish, *given)

    def close(self) -> None:
        """Nothing to release."""


def place_of(folder: str | os.PathLike[str]) -> FolderPlace | BucketPlace:
    """Where checkpoints are.

    Args:
      folder: a path, or a URL.

    Raises:
      ValueError: if it is a URL of an unknown kind.
    """
    if is_url(folder):
        return BucketPlace(as_url(os.fspath(folder)))
    return FolderPlace(Path(folder).expanduser().absolute())
