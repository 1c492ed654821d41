"""How are a step's arrays written, by Orbax, and read: one array per leaf.

They are not compressed, so that the sizes that a manifest declares can be checked
against the bytes on disk.
"""

import contextlib
import functools
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
import xxhash

from jaxpar.checkpoint.leaves import LeafSpec
from jaxpar.checkpoint.logs import quiet_orbax
from jaxpar.checkpoint.manifest import DamagedError, Manifest
from jaxpar.checkpoint.outcome import SaveOutcome
from jaxpar.checkpoint.slices import (
    Box,
    DifferentError,
    Reads,
    Slices,
    read_compared,
    read_slice,
)

ARRAYS = "arrays"
"""Orbax's sub-folder of a step."""

_CANT_READ = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What TensorStore raises for files that are not in its format."""

_LEAST_IN_FLIGHT = 64 << 20
"""Bytes in flight between disk and devices, at least; the largest leaf's if that is
more: host memory that a restore needs besides the shards."""
_LONGEST_NAME = 180
_WRITERS_SECONDS = 60.0


def array_name(leaf: str) -> str:
    """A leaf's array name on disk: its own name, escaped for a file name.

    Example:
      >>> array_name("params/mlp/kernel"), array_name("../evil")
      ('params%2Fmlp%2Fkernel', '%2E%2E%2Fevil')
    """
    quoted = urllib.parse.quote(leaf, safe="").replace(".", "%2E")
    if len(quoted) <= _LONGEST_NAME:
        return quoted
    return f"{quoted[: _LONGEST_NAME - 40]}~{xxhash.xxh3_128_hexdigest(leaf.encode())}"


class Writer:
    """Writes sharded arrays in the background, one step at a time."""

    def __init__(self):
        quiet_orbax()
        # Threads that wait for a folder that could not be made would wait for minutes.
        options = ocp.options.AsyncOptions(
            create_directories_asynchronously=False, barrier_sync_fn=self._wait_for_all
        )
        self._outcome: SaveOutcome | None = None
        self._orbax = ocp.AsyncCheckpointer(_handler(), async_options=options)

    def start(
        self, folder: Path, arrays: Mapping[str, jax.Array], outcome: SaveOutcome
    ) -> None:
        """Copy arrays to the host, and begin to write them.

        All processes call it, each for its shards. The arrays may be donated or
        deleted as soon as this returns.

        Args:
          folder: the step's folder, which exists.
          arrays: leaf name -> array.
          outcome: of the save, by which the writing ends when another process fails.
        """
        self._outcome = outcome
        named = {array_name(leaf): array for leaf, array in arrays.items()}
        self._orbax.save(folder / ARRAYS, args=ocp.args.PyTreeSave(named))

    def wait(self) -> None:
        """Return when everything is written; raise the error if it failed."""
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(_let_writers_end)
            self._orbax.wait_until_finished()
            on_failure.pop_all()

    def close(self) -> None:
        """Release the threads; no save may be running."""
        self._orbax.close()

    def _wait_for_all(self, *, key: str, timeout_ms: int) -> None:
        """Instead of Orbax's own, which waits 20 minutes for a process that failed."""
        assert self._outcome is not None, "set by start"
        self._outcome.wait_for_all(key, timeout_ms / 1000)


def read_sharded(
    folder: Path,
    structs: Mapping[str, jax.ShapeDtypeStruct],
    slices: Mapping[str, Slices] = MappingProxyType({}),
) -> dict[str, jax.Array]:
    """Read leaves onto their shardings; every process reads its devices' shards.

    Args:
      folder: the step's folder.
      structs: leaf name -> shape, dtype and sharding; the shape is the stored one.
      slices: leaf name -> the slices that were written, to compare with.

    Returns:
      Leaf name -> array.

    Raises:
      DifferentError: if what is read is not what was written.
    """
    shapes = {leaf: tuple(struct.shape) for leaf, struct in structs.items()}
    return read_by(_reader(folder, shapes), structs, slices)


def read_by(
    read: Reads,
    structs: Mapping[str, jax.ShapeDtypeStruct],
    slices: Mapping[str, Slices],
) -> dict[str, jax.Array]:
    """Read leaves as `read_sharded` does, by what reads boxes of them."""
    largest = max(x.size * x.dtype.itemsize for x in structs.values())
    in_flight = max(largest, _LEAST_IN_FLIGHT)
    return read_compared(structs, slices, read, in_flight=in_flight)


def compare_slices(
    folder: Path, manifest: Manifest, slices: Mapping[str, Slices]
) -> None:
    """Read slices that have a checksum, one after the other, and compare them.

    Args:
      folder: the step's folder.
      manifest: of the step.
      slices: leaf name -> its slices.

    Raises:
      DifferentError: if one is not what was written.
    """
    shapes = {name: spec.stored.shape for name, spec in manifest.leaves.items()}
    compare_by(_reader(folder, shapes), shapes, slices)


def compare_by(
    read: Reads,
    shapes: Mapping[str, tuple[int, ...]],
    slices: Mapping[str, Slices],
) -> None:
    """Compare slices as `compare_slices` does, by what reads boxes of them."""
    for name, each in slices.items():
        for place, box in each.boxes(shapes[name]):
            if place in each.checksums:
                read_slice(read, name, each, (place, box))


def read_whole(folder: Path, leaf: str, manifest: Manifest) -> np.ndarray:
    """Read one leaf into this process's memory, and compare it.

    Args:
      folder: the step's folder, checked by `require_declared`.
      leaf: its name.
      manifest: of the step.

    Returns:
      The stored array.

    Raises:
      DamagedError: if what is read is not what was written.
    """
    read = _reader(folder, {leaf: manifest.leaves[leaf].stored.shape})
    return read_whole_by(read, repr(str(folder)), leaf, manifest)


def read_whole_by(read: Reads, where: str, leaf: str, manifest: Manifest) -> np.ndarray:
    """Read one leaf as `read_whole` does, by what reads boxes of it.

    Args:
      read: reads them.
      where: the step, for messages.
      leaf: its name.
      manifest: of the step.

    Returns:
      The stored array.

    Raises:
      DamagedError: if what is read is not what was written.
    """
    shape = manifest.leaves[leaf].stored.shape
    slices = manifest.slices.get(leaf, Slices(shape, {}))
    found = np.empty(shape, jnp.dtype(manifest.leaves[leaf].stored.dtype))
    try:
        for place, box in slices.boxes(shape):
            index = tuple(slice(*ends) for ends in box)
            found[index] = read_slice(read, leaf, slices, (place, box))
    except DifferentError as error:
        raise DamagedError(f"{where} is damaged: {error}") from error
    return found


def _reader(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Reads:
    """Reads boxes of leaves of a step's folder."""

    def store(leaf: str) -> dict[str, Any]:
        base = {"driver": "file", "path": f"{folder / ARRAYS}/"}
        return {"driver": "ocdbt", "base": base, "path": f"{array_name(leaf)}/"}

    return reader(store, shapes)


def reader(
    store: Callable[[str], dict[str, Any]], shapes: Mapping[str, tuple[int, ...]]
) -> Reads:
    """Reads boxes of leaves, each opened once; what it can't read is damaged.

    Args:
      store: TensorStore's description of where a leaf is.
      shapes: leaf name -> its shape.
    """

    @functools.cache
    def opened(leaf: str) -> Any:
        found = tensorstore.open(
            {"driver": "zarr", "kvstore": store(leaf)},
            open=True,
            read=True,
            context=context,
        ).result()
        if tuple(found.shape) != shapes[leaf]:
            raise DifferentError(f"{leaf} is {found.shape} on disk, not {shapes[leaf]}")
        return found

    def read(name: str, box: Box) -> np.ndarray:
        place = tuple(slice(*ends) for ends in box)
        try:
            return opened(name)[place].read(order="C").result()
        except DifferentError:
            raise
        except _CANT_READ as error:
            reason = f"{type(error).__name__}: {str(error)[:500]}"
            raise DifferentError(f"{name} can't be read ({reason})") from error

    context = tensorstore.Context()
    return read


def require_declared(folder: Path, leaves: Mapping[str, LeafSpec]) -> None:
    """Reject a step whose arrays on disk differ from its manifest.

    Args:
      folder: the step's folder; nothing is loaded.
      leaves: the manifest's.

    Raises:
      RuntimeError: if an array is missing, or of another shape or dtype.
    """
    with ocp.Checkpointer(_handler()) as reader:
        metadata: Any = reader.metadata(folder / ARRAYS)
    tree = getattr(metadata, "item_metadata", metadata)
    found = {
        name: LeafSpec(tuple(each.shape), str(np.dtype(each.dtype)))
        for name, each in getattr(tree, "tree", tree).items()
    }
    wanted = {
        array_name(name): spec.stored for name, spec in leaves.items() if spec.num_bytes
    }
    if found != wanted:
        wrong = sorted(n for n in {**wanted, **found} if found.get(n) != wanted.get(n))
        raise RuntimeError(
            f"{str(folder)!r}: arrays {', '.join(wrong[:10])} on disk differ from the "
            "manifest"
        )


def _handler() -> ocp.PyTreeCheckpointHandler:
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)


def _let_writers_end() -> None:
    """Join the threads of a failed save.

    Orbax reports the first error and leaves the other threads writing, with their
    copies of the arrays.
    """
    until = time.monotonic() + _WRITERS_SECONDS
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            # Orbax's own join raises the thread's error, which is already known.
            threading.Thread.join(thread, max(0.0, until - time.monotonic()))
