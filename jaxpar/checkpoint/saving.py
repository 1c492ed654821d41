"""When is a step saved: once its files are on disk, verified and under its name."""

import contextlib
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import jax

from jaxpar.checkpoint import arrays as stored_arrays
from jaxpar.checkpoint import folder as files
from jaxpar.checkpoint.manifest import Manifest, seal, sync
from jaxpar.checkpoint.processes import gather
from jaxpar.checkpoint.retention import Keep
from jaxpar.checkpoint.slices import Slices, checksums
from jaxpar.launch.lease import require_lease


def finish(
    folder: Path, writer: stored_arrays.Writer, manifest: Manifest, keep: Keep
) -> None:
    """Wait for a step's arrays; verify and rename it, and delete old steps.

    Process 0 does what is done once; nothing here waits for another process.

    Args:
      folder: of the checkpoints.
      writer: writes the arrays.
      manifest: of the step, without files.
      keep: which steps to keep.

    Raises:
      OSError, ValueError, RuntimeError: the cause of a failure (`LeaseLostError` is
        one); the step's files are deleted then.
    """
    written = files.saving_path(folder, manifest.step)
    is_first = jax.process_index() == 0
    with contextlib.ExitStack() as on_failure:
        if is_first:
            on_failure.callback(shutil.rmtree, written, ignore_errors=True)
        writer.wait()
        if is_first:
            stored_arrays.require_declared(written, manifest.leaves)
            seal(written, manifest)
            require_lease(folder)
            written.rename(files.step_path(folder, manifest.step))
            sync(folder)
        on_failure.pop_all()
    if is_first:
        steps = dict.fromkeys(files.complete_steps(folder))
        for step in keep.going(files.metrics(folder) if keep.best else steps):
            files.delete_step(folder, step)


def all_checksums(arrays: Mapping[str, jax.Array]) -> dict[str, Slices]:
    """What the devices hold of arrays, each slice hashed by the process that owns it.

    Args:
      arrays: name -> array; every process calls it.
    """
    own = checksums(arrays)
    everyone = gather({name: each.checksums for name, each in own.items()})
    found: dict[str, dict[str, str]] = {name: {} for name in own}
    for process in everyone:
        for name, entries in process.items():
            found[name].update(entries)
    return {name: Slices(each.shape, found[name]) for name, each in own.items()}


def versions() -> dict[str, str]:
    """Versions of the software that saves a step."""
    return {name: metadata.version(name) for name in ("jax", "orbax-checkpoint")}
