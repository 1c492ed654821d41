"""Which steps does a folder hold, and which of them can be restored?

A step is one folder, "step_00000120", with Orbax's arrays and a manifest in it. It is
written under another name, verified and renamed: a folder with a step's name was
complete then. Later damage is found by comparing its files with the manifest.
"""

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxpar.checkpoint import manifest as manifests
from jaxpar.checkpoint.manifest import DIGEST, MANIFEST, DamagedError, Manifest
from jaxpar.launch.lease import lease_of
from jaxpar.launch.own_files import (
    exists,
    is_file,
    is_folder,
    is_link,
    names_in,
    retried,
)
from jaxpar.launch.own_files import set_aside as put_aside

STEP_PREFIX = "step"
STEP_DIGITS = 8
SAVING, DELETING = ".saving", ".deleting"

_STEP_NAME = re.compile(rf"{STEP_PREFIX}_(\d{{{STEP_DIGITS},}})")
_LEFT = re.compile(
    rf"{_STEP_NAME.pattern}({re.escape(SAVING)}([.]\d+)*|{re.escape(DELETING)})"
)
_SPARE_BYTES = 1 << 20
"""Bytes besides the arrays: the manifest, and Orbax's own files."""


def step_path(folder: Path, step: int) -> Path:
    """Return where a step is stored, whether it exists or not."""
    return folder / step_name(step)


def step_name(step: int) -> str:
    """Return a step's name in its folder."""
    return f"{STEP_PREFIX}_{step:0{STEP_DIGITS}d}"


def step_of(name: str) -> int | None:
    """The step that has a name; None if none has."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def saving_path(folder: Path, step: int, number: int = 0) -> Path:
    """Return where a step is written until it is complete.

    Under a lease it has the lease's number, so that a process that lost the run, and
    goes on writing before it knows, writes nothing into another one's step. It has the
    number of the save, so that threads of a failed one write nothing into the next.
    """
    path, lease = step_path(folder, step), lease_of(folder)
    numbers = (lease.number if lease else 0, number)
    ending = "".join(f".{each}" for each in numbers if each)
    return path.with_name(path.name + SAVING + ending)


def step_folders(folder: Path) -> dict[int, Path]:
    """Return every folder with a step's name, complete or not, newest first."""
    matches = ((_STEP_NAME.fullmatch(name), folder / name) for name in names_in(folder))
    found = {
        int(match[1]): path
        for match, path in matches
        if match and is_folder(path) and not is_link(path)
    }
    return dict(sorted(found.items(), reverse=True))


def is_complete(path: Path) -> bool:
    """Whether a step's folder has a manifest; its files may be damaged."""
    return is_file(path / MANIFEST) and is_file(path / DIGEST)


def complete_steps(folder: Path) -> Iterator[int]:
    """Yield the steps that have a manifest, newest first."""
    return (step for step, path in step_folders(folder).items() if is_complete(path))


def verified(path: Path, step: int, *, of_arrays: bool = True) -> Manifest:
    """Compare every file of a step with its manifest.

    Args:
      path: its folder.
      step: the expected step number.
      of_arrays: as for `jaxpar.checkpoint.manifest.damages`.

    Returns:
      The manifest.

    Raises:
      DamagedError: if they differ; the message names the files.
    """
    found = manifests.read_manifest(path)
    wrong = manifests.damages(path, found, of_arrays=of_arrays)
    if found.step != step:
        wrong.insert(0, f"{MANIFEST}: is of step {found.step}")
    if wrong:
        raise DamagedError(f"{str(path)!r} is damaged: {_listed(wrong)}")
    return found


def choose(
    folder: Path, step: int | None, damaged: Mapping[int, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Find the step to restore: the given one, or the newest valid one.

    Its arrays are compared when they are read.

    Args:
      folder: where the checkpoints are.
      step: the step; None for the newest.
      damaged: step -> why it can't be restored, of those that are known.

    Returns:
      {"step": its number, "skipped": [[number, why]] of newer ones}.

    Raises:
      FileNotFoundError: if the step, or any step, is missing or has no manifest.
      DamagedError: if it is damaged, or all are.
    """
    folders = step_folders(folder)

    def verify(number: int) -> None:
        verified(folders[number], number, of_arrays=False)

    steps = {number: is_complete(path) for number, path in folders.items()}
    return choose_among(str(folder), steps, step, damaged, verify)


def choose_among(
    where: str,
    steps: Mapping[int, bool],
    step: int | None,
    damaged: Mapping[int, str],
    verify: Callable[[int], object],
) -> dict[str, Any]:
    """Find the step to restore, as `choose` does.

    Args:
      where: the folder, for messages.
      steps: each step, newest first -> whether it has a manifest.
      step: as for `choose`.
      damaged: as for `choose`.
      verify: raises DamagedError for a damaged one.
    """
    complete = [number for number, is_whole in steps.items() if is_whole]
    if step is not None and step not in complete:
        state = "has no manifest" if step in steps else "does not exist"
        raise FileNotFoundError(
            f"checkpoint '{where}/{step_name(step)}' {state}; restore one of the "
            f"complete steps, {sorted(complete)}"
        )
    if not complete:
        names = ", ".join(map(step_name, steps))
        raise FileNotFoundError(
            f"folder {where!r} has no complete checkpoint"
            f"{f' (without a manifest: {names})' if names else ''}; save one first, or "
            "give the folder that a run saved to"
        )
    skipped: list[list[Any]] = []
    for number in steps if step is None else [step]:
        if number not in complete:
            skipped.append([number, f"{step_name(number)} has no manifest"])
            continue
        if number in damaged:
            skipped.append([number, damaged[number]])
            continue
        try:
            verify(number)
        except DamagedError as error:
            skipped.append([number, str(error)])
        else:
            return {"step": number, "skipped": skipped}
    reasons = "; ".join(why for _, why in skipped)
    others = sorted(set(complete) - {number for number, _ in skipped})
    remedy = f"restore another step of {others}" if others else "there is no other step"
    raise DamagedError(f"{reasons}; {remedy}")


def unreadable_newest(folder: Path, known: Set[int]) -> set[int]:
    """Find the newest steps whose manifest is damaged, up to the first that is not.

    Args:
      folder: where the checkpoints are.
      known: damaged steps to skip.
    """
    found: set[int] = set()
    for step in complete_steps(folder):
        if step not in known:
            try:
                manifests.read_manifest(step_path(folder, step))
            except DamagedError:
                found.add(step)
            else:
                break
    return found


def require_room(folder: Path, step: int, needed: int) -> None:
    """Refuse to begin a save that does not fit on the disk.

    Args:
      folder: the folder of the checkpoints; it exists.
      step: the step.
      needed: bytes of its arrays.

    Raises:
      OSError: if fewer bytes are free.
    """
    free = retried(lambda: shutil.disk_usage(folder).free, folder)
    needed += _SPARE_BYTES
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"step {step} needs {needed:,} bytes in {str(folder)!r}, where {free:,} "
            "are free: nothing was written. Make room, keep fewer steps, or save to "
            "another disk",
        )


def set_aside(folder: Path, damaged: Iterable[int]) -> list[str]:
    """Rename damaged steps to "step_00000120.damaged".

    Under their own name they would count among the newest that are kept, and block the
    same step when training reaches it again.

    Args:
      folder: where the checkpoints are.
      damaged: steps known to be damaged. Steps without a manifest that are newer than
        any with one are renamed as well; older ones are interrupted deletions.

    Returns:
      The names that the renamed steps had.
    """
    folders = step_folders(folder)
    sound = [s for s in complete_steps(folder) if s not in set(damaged)]
    newest = max(sound, default=-1)
    going = {s for s in folders if s > newest or s in set(damaged)}
    names = []
    for path in (folders[step] for step in sorted(going)):
        put_aside(path)
        names.append(path.name)
    return names


def clean_up(folder: Path) -> None:
    """Delete the remains of interrupted saves and deletions."""
    for name in filter(_LEFT.fullmatch, names_in(folder)):
        if not is_link(folder / name):
            delete(folder / name)


def delete_step(folder: Path, step: int) -> None:
    """Delete a step atomically: first its name, then its files."""
    path = step_path(folder, step)
    going = path.with_name(path.name + DELETING)
    rename(path, going)
    delete(going)


def rename(path: Path, new: Path) -> None:
    """Rename a folder; one that a failing disk has renamed already is fine."""

    def moved() -> None:
        with contextlib.suppress(FileNotFoundError):
            path.rename(new)
        if not exists(new):
            raise FileNotFoundError(errno.ENOENT, "is missing", os.fspath(path))

    retried(moved, path)


def delete(path: Path) -> None:
    """Delete a folder that no step is in; what resists is left to a later save."""

    def remove() -> None:
        if exists(path):
            shutil.rmtree(path)

    with contextlib.suppress(OSError):
        retried(remove, path)


def metrics(folder: Path) -> dict[int, float | None]:
    """Every complete step -> its metric, or None if there is none."""
    found: dict[int, float | None] = {}
    for step in complete_steps(folder):
        found[step] = None
        with contextlib.suppress(ValueError):
            found[step] = manifests.read_manifest(step_path(folder, step)).metric
    return found


def make_writable(folder: Path) -> None:
    """Create a folder if needed, and check that files can be written in it.

    Raises:
        NotADirectoryError: If the folder, or a folder above it, is a file.
        PermissionError: If it can't be created or written in.
    """
    blocking = next((p for p in (folder, *folder.parents) if exists(p)), folder)
    if not is_folder(blocking):
        raise NotADirectoryError(
            f"folder {str(folder)!r} can't hold checkpoints: {str(blocking)!r} is a "
            "file; choose another folder, or move that file away"
        )
    try:
        retried(lambda: folder.mkdir(parents=True, exist_ok=True), folder)
        retried(lambda: tempfile.TemporaryFile(dir=folder).close(), folder)
    except OSError as error:
        raise PermissionError(
            f"folder {str(folder)!r} can't be written ({os.strerror(error.errno or 0)})"
            "; choose another folder, or give this user write permission"
        ) from error


def _listed(wrong: list[str], shown: int = 10) -> str:
    more = [f"and {len(wrong) - shown} more"] if len(wrong) > shown else []
    return "; ".join([*wrong[:shown], *more])
