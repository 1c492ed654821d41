"""How are checkpoints stored in a bucket, where nothing can be renamed?

A step's arrays are objects under a name of their own for each save, one for each slice
that a device held, or several for a large one. Its manifest is written last, if there
is none, and then its checksum: a step without both does not exist. Objects are written
and read by TensorStore, without another package.
"""

import contextlib
import dataclasses
import errno
import functools
import math
import uuid
from collections.abc import Iterable, Mapping, Set
from typing import Any

import jax
import numpy as np
import tensorstore

from jaxpar.checkpoint import arrays as stored_arrays
from jaxpar.checkpoint import folder as files
from jaxpar.checkpoint import manifest as manifests
from jaxpar.checkpoint.leaves import LeafSpec
from jaxpar.checkpoint.manifest import DIGEST, MANIFEST, DamagedError, Manifest
from jaxpar.checkpoint.outcome import SaveOutcome
from jaxpar.checkpoint.retention import Keep
from jaxpar.checkpoint.saving import ReadBack
from jaxpar.checkpoint.slices import DifferentError, Slices
from jaxpar.launch.lease import require_lease
from jaxpar.launch.object_stores import kvstore

_MOST_BYTES = 256 << 20
"""Of an object: stores take at most 5 GB in one request."""
_SECONDS = 1200.0
"""For the slowest process to write its part."""
_MISSING = b"\x02"
"""TensorStore's generation of an object that is not there."""


@dataclasses.dataclass(frozen=True)
class BucketFolder:
    """A folder of a bucket, of one run's checkpoints.

    Attributes:
      url: "s3://bucket/folder", by `jaxpar.launch.object_stores.as_url`.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def steps(self) -> dict[int, bool]:
        """Each step, newest first -> whether it has a manifest."""
        found: dict[int, set[str]] = {}
        for key in _asked(_opened(self.url).list(), self.url):
            name, _, rest = key.decode(errors="replace").partition("/")
            step = files.step_of(name)
            if step is not None:
                found.setdefault(step, set()).add(rest)
        return {
            step: {MANIFEST, DIGEST} <= found[step]
            for step in sorted(found, reverse=True)
        }

    def complete(self) -> list[int]:
        """The steps that have a manifest, newest first."""
        return [step for step, is_whole in self.steps().items() if is_whole]

    def step(self, number: int) -> "BucketStep":
        """A step, whether it exists or not."""
        return BucketStep(self, number)

    def choose(self, step: int | None, damaged: Mapping[int, str]) -> dict[str, Any]:
        """As `jaxpar.checkpoint.folder.choose`."""

        def verify(number: int) -> None:
            self.step(number).manifest()

        found = self.steps()
        # One without a manifest is being written, or was interrupted.
        whole = {number: True for number, is_whole in found.items() if is_whole}
        return files.choose_among(self.url, whole or found, step, damaged, verify)

    def unreadable_newest(self, known: Set[int]) -> set[int]:
        """As `jaxpar.checkpoint.folder.unreadable_newest`."""
        found: set[int] = set()
        for step in self.complete():
            if step not in known:
                try:
                    self.step(step).manifest()
                except DamagedError:
                    found.add(step)
                else:
                    break
        return found

    def prepare(
        self, step: int, count: int, needed: int, damaged: Iterable[int]
    ) -> tuple[str, str | None]:
        """Check that objects can be written, and delete what no step is in.

        Args:
          step: that will be written.
          count: of the save.
          needed: bytes of its arrays; a bucket has room.
          damaged: steps known to be damaged; they are deleted too.

        Returns:
          What to warn of, or ""; and the name of the step's objects.

        Raises:
          PermissionError: if nothing can be written.
        """
        try:
            _asked(_opened(self.url).write("writable", b""), self.url)
        except OSError as error:
            raise PermissionError(
                f"folder {self.url!r} can't be written ({error.strerror}); choose "
                "another folder, or give this user's credentials the permission"
            ) from error
        found, going = self.steps(), set(damaged)
        for number, is_whole in found.items():
            if not is_whole or number in going:
                self.step(number).delete()
        whole = {number for number, is_whole in found.items() if is_whole}
        names = [files.step_name(number) for number in sorted(going & whole)]
        said = f"damaged checkpoints in {self.url!r} were deleted: {', '.join(names)}"
        # Writers of a save that has failed write nothing into the next one.
        return (said if names else ""), f"arrays.{uuid.uuid4().hex}"

    def keep(self, rules: Keep) -> None:
        """Delete the steps that are not to be kept."""
        metrics: dict[int, float | None] = {}
        for step in self.complete():
            metrics[step] = None
            if rules.best:
                with contextlib.suppress(ValueError):
                    metrics[step] = self.step(step).manifest().metric
        for step in rules.going(metrics):
            self.step(step).delete()


@dataclasses.dataclass(frozen=True)
class BucketStep:
    """A step in a bucket.

    Attributes:
      bucket: the folder.
      number: of the step.
    """

    bucket: BucketFolder
    number: int

    @property
    def name(self) -> str:
        """Its name in the folder."""
        return files.step_name(self.number)

    def __str__(self) -> str:
        return f"{self.bucket.url}/{self.name}"

    def manifest(self) -> Manifest:
        """Read its manifest.

        Raises:
          DamagedError: if it differs from what was written.
        """
        text, checksum = (self._read(name) for name in (MANIFEST, DIGEST))
        found = manifests.parsed(text, checksum, str(self))
        if found.step != self.number or found.objects is None:
            raise DamagedError(f"'{self}/{MANIFEST}' is of another step")
        return found

    def verify(self) -> Manifest:
        """Read all of it, and compare it.

        Raises:
          DamagedError: if something differs from what was written.
        """
        manifest = self.manifest()
        try:
            self.compare(manifest, manifest.slices)
        except DifferentError as error:
            raise DamagedError(f"'{self}' is damaged: {error}") from error
        return manifest

    def state(self, _: Manifest) -> str:
        """What is known of it without a request for each object."""
        return "verified when saved"

    def saved_at(self) -> float | None:
        """Unknown: TensorStore does not ask."""
        return None

    def require_declared(self, manifest: Manifest) -> None:
        """Nothing to do: every slice has a checksum, which a reader compares."""

    def read_whole(self, leaf: str, manifest: Manifest) -> np.ndarray:
        """As `jaxpar.checkpoint.arrays.read_whole`."""
        read = self._reader(manifest, {leaf: manifest.leaves[leaf].stored.shape})
        return stored_arrays.read_whole_by(read, f"'{self}'", leaf, manifest)

    def read_sharded(
        self,
        structs: Mapping[str, jax.ShapeDtypeStruct],
        slices: Mapping[str, Slices],
    ) -> dict[str, jax.Array]:
        """As `jaxpar.checkpoint.arrays.read_sharded`."""
        shapes = {leaf: tuple(struct.shape) for leaf, struct in structs.items()}
        read = self._reader(self.manifest(), shapes)
        return stored_arrays.read_by(read, structs, slices)

    def compare(self, manifest: Manifest, slices: Mapping[str, Slices]) -> None:
        """Read slices back, and compare them.

        Raises:
          DifferentError: if one is not what was written.
        """
        specs = manifest.leaves
        shapes = {leaf: specs[leaf].stored.shape for leaf in slices}
        read = self._reader(manifest, shapes)
        stored_arrays.compare_by(read, shapes, slices)

    def commit(self, manifest: Manifest) -> None:
        """Make the step exist.

        Raises:
          FileExistsError: if another process has made it exist.
          LeaseLostError: if another process has taken the run over.
        """
        require_lease(self.bucket.url)
        text, store = manifest.as_json(), _opened(self.bucket.url)
        stamp = _asked(
            store.write(f"{self.name}/{MANIFEST}", text, if_equal=_MISSING), str(self)
        )
        if self._read(MANIFEST) != text or not stamp.generation:
            raise FileExistsError(
                errno.EEXIST, "another process has saved this step", str(self)
            )
        checksum = manifests.digest(text).encode()
        _asked(store.write(f"{self.name}/{DIGEST}", checksum), str(self))

    def delete(self) -> None:
        """Delete it: first what makes it exist, then all."""
        store = _opened(self.bucket.url)
        for name in (DIGEST, MANIFEST):
            _asked(store.write(f"{self.name}/{name}", None), str(self))
        # "0" follows "/".
        whole = tensorstore.KvStore.KeyRange(f"{self.name}/", f"{self.name}0")
        _asked(store.delete_range(whole), str(self))

    def place(self, objects: str, leaf: str) -> dict[str, Any]:
        """TensorStore's description of where a leaf is."""
        path = f"{self}/{objects}/{stored_arrays.array_name(leaf)}"
        return kvstore(path)

    def _reader(self, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        assert manifest.objects is not None, "checked by manifest"
        place = functools.partial(self.place, manifest.objects)
        return stored_arrays.reader(place, shapes)

    def _read(self, name: str) -> bytes:
        try:
            key = f"{self.name}/{name}"
            found = _asked(_opened(self.bucket.url).read(key), str(self))
        except OSError as error:
            raise DamagedError(
                f"'{self}/{name}' can't be read ({error.strerror})"
            ) from error
        if found.state != "value":
            raise DamagedError(f"'{self}/{name}' is missing")
        return found.value


class ObjectWriter:
    """Writes a step's arrays to a bucket, in the background."""

    def __init__(self):
        self._held: list[tuple[str, Any, np.ndarray]] = []

    def start(self, arrays: Mapping[str, jax.Array]) -> None:
        """Copy the slices that this process owns to the host.

        Args:
          arrays: leaf name -> array.
        """
        self._held = [
            (leaf, s.index, np.array(s.data))
            for leaf, x in arrays.items()
            for s in x.addressable_shards
            if s.replica_id == 0
        ]

    def write(self, step: BucketStep, manifest: Manifest) -> None:
        """Write what was copied; the first process describes each array.

        Raises:
          OSError: if something can't be written.
        """
        assert manifest.objects is not None
        is_first, held = jax.process_index() == 0, self._held
        self._held = []
        opened = functools.cache(
            lambda leaf: _create(
                step.place(manifest.objects or "", leaf),
                manifest.leaves[leaf].stored,
                manifest.slices[leaf].shape,
                is_first=is_first,
            )
        )
        if is_first:
            for leaf in manifest.slices:
                opened(leaf)
        running = [opened(leaf)[at].write(own) for leaf, at, own in held]
        for each in running:
            _asked(each, str(step))


def finish(
    outcome: SaveOutcome,
    step: BucketStep,
    writer: ObjectWriter,
    manifest: Manifest,
    keep: Keep,
    read_back: ReadBack,
) -> None:
    """Write a step; once every process has compared its part, process 0 commits it.

    Args:
      outcome: of the save.
      step: that is written.
      writer: has the arrays.
      manifest: of the step.
      keep: which steps to keep.
      read_back: what this process compares.

    Raises:
      OSError, ValueError, RuntimeError: the cause of a failure.
    """
    writer.write(step, manifest)
    outcome.wait_for_all("written", _SECONDS)
    step.compare(manifest, read_back.sample())
    outcome.wait_for_all("compared", _SECONDS)
    if jax.process_index() == 0:
        step.commit(manifest)
        step.bucket.keep(keep)
    outcome.wait_for_all("committed", _SECONDS)


@functools.cache
def _opened(url: str) -> tensorstore.KvStore:
    return _asked(tensorstore.KvStore.open(kvstore(url)), url)


def _create(
    place: dict[str, Any], spec: LeafSpec, shape: tuple[int, ...], *, is_first: bool
) -> Any:
    """An array to write slices of; only the first process writes its description."""
    shape = _object_shape(shape, spec.num_bytes // max(math.prod(spec.shape), 1))
    own: dict[str, Any] = {"create": True} if is_first else {"assume_metadata": True}
    return _asked(
        tensorstore.open(
            {"driver": "zarr", "kvstore": place, "metadata": {"compressor": None}},
            open=True,
            dtype=tensorstore.dtype(spec.dtype),
            shape=spec.shape,
            chunk_layout=tensorstore.ChunkLayout(chunk_shape=shape),
            **own,
        ),
        place["path"],
    )


def _object_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The shape of one object of a slice: halves of it until they are small enough."""
    found = list(shape)
    while math.prod(found) * itemsize > _MOST_BYTES:
        even = [i for i, n in enumerate(found) if n % 2 == 0]
        if not even:
            break
        largest = max(even, key=lambda i: found[i])
        found[largest] //= 2
    return tuple(found)


def _asked(future: Any, where: str) -> Any:
    """What a store answers.

    Raises:
      OSError: if it fails.
    """
    try:
        return future.result()
    except (ValueError, RuntimeError, LookupError) as error:
        why = f"{type(error).__name__}: {str(error)[:500]}"
        raise OSError(errno.EIO, why, where) from error
