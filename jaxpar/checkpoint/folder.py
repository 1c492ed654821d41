"""Which checkpoints a folder holds, and which of them are whole.

A step is one folder, "step_00000120", with three items in it: state, data, meta. Orbax
writes it under a temporary name, puts a commit marker into each item and into the step,
and renames it, so an interrupted save never bears a step's name. A copy cut short or a
lost file can, and Orbax would load it: a step counts here only with all its markers.
"""

import itertools
import json
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEP_PREFIX = "step"
STEP_DIGITS = 8
STATE, DATA, META = "state", "data", "meta"
DATA_FILE, META_FILE = "data.json", "meta.json"
# To be raised when the code before can't read what is written from then on.
FORMAT = 1

_MARKER = "commit_success.txt"
_STEP_NAME = re.compile(rf"{STEP_PREFIX}_(\d{{{STEP_DIGITS},}})")


def step_path(folder: Path, step: int) -> Path:
    """Return where a step is stored, whether it exists or not."""
    return folder / f"{STEP_PREFIX}_{step:0{STEP_DIGITS}d}"


def step_folders(folder: Path) -> dict[int, Path]:
    """Return every folder that bears a step's name, whole or not, newest first."""
    if not folder.is_dir():
        return {}
    matches = ((_STEP_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    found = {int(match[1]): path for match, path in matches if match}
    return dict(sorted(found.items(), reverse=True))


def is_complete(path: Path) -> bool:
    """Whether a step's folder has the commit marker of the step and of its items."""
    markers = [path / item / _MARKER for item in (".", STATE, DATA, META)]
    return all(marker.is_file() and marker.stat().st_size for marker in markers)


def complete_steps(folder: Path) -> Iterator[int]:
    """Yield the steps that can be restored, newest first."""
    return (step for step, path in step_folders(folder).items() if is_complete(path))


def read_meta(path: Path) -> dict[str, Any]:
    """Read what jaxpar wrote beside a step's arrays: run, leaves, the user's meta.

    Raises:
        ValueError: If it is damaged, or a newer version of jaxpar wrote it.
    """
    meta = _read_json(path / META / META_FILE)
    if meta["format"] > FORMAT:
        raise ValueError(
            f"checkpoint {str(path)!r} has format {meta['format']}, and this jaxpar "
            f"reads formats up to {FORMAT}: update jaxpar to restore it"
        )
    return meta


def read_data(path: Path) -> list[Any]:
    """Read the data states that were saved with a step, one of each process.

    Raises:
        ValueError: If the file is damaged.
    """
    return _read_json(path / DATA / DATA_FILE)["states"]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"checkpoint file {str(path)!r} is damaged ({error}); restore another "
            "step, or move the step's folder away"
        ) from error


def read_step(folder: Path, step: int | None) -> dict[str, Any]:
    """Choose the step to restore and read all of it but the arrays.

    Args:
        folder: Where the checkpoints are.
        step: The step to read; None for the newest complete one.

    Returns:
        {"step": its number, "content": what read_meta gives, "data": the data states}.

    Raises:
        FileNotFoundError: If the step, or any step, is missing or incomplete.
        ValueError: If a file is damaged or of a newer format.

    Warns:
        UserWarning: If newer steps are incomplete and were skipped.
    """
    folders = step_folders(folder)
    complete = [number for number, path in folders.items() if is_complete(path)]
    if step is not None and step not in complete:
        state = (
            "is incomplete: commit markers are missing"
            if step in folders
            else ("does not exist")
        )
        raise FileNotFoundError(
            f"checkpoint {str(step_path(folder, step))!r} {state}; restore one of the "
            f"complete steps, {sorted(complete)}"
        )
    if not complete:
        names = ", ".join(path.name for path in folders.values())
        raise FileNotFoundError(
            f"folder {str(folder)!r} has no complete checkpoint"
            f"{f' (incomplete: {names})' if names else ''}; save one first, or give "
            "the folder that a run saved to"
        )
    chosen = complete[0] if step is None else step
    skipped = [path.name for number, path in folders.items() if number > complete[0]]
    if step is None and skipped:
        warnings.warn(
            f"skipped in {str(folder)!r}, because commit markers are missing: "
            f"{', '.join(skipped)}; restoring step {chosen}",
            stacklevel=5,
        )
    path = folders[chosen]
    return {"step": chosen, "content": read_meta(path), "data": read_data(path)}


def set_aside_incomplete(folder: Path) -> list[str]:
    """Rename the newest steps, if incomplete, to "step_00000120.incomplete".

    Under their own name they would count among the newest that are kept, and stand in
    the way when training reaches their step again. Incomplete steps older than a
    complete one keep their name: most are deletions cut short, and are deleted in turn.

    Returns:
        The names that the renamed steps had.
    """
    newest = next(complete_steps(folder), -1)
    paths = [path for step, path in step_folders(folder).items() if step > newest]
    for path in paths:
        numbers = (f".{number}" for number in itertools.count(2))
        endings = itertools.chain([""], numbers)
        names = (f"{path.name}.incomplete{ending}" for ending in endings)
        path.rename(next(folder / n for n in names if not (folder / n).exists()))
    return [path.name for path in paths]


def make_writable(folder: Path) -> None:
    """Create a folder if need be and make sure that files can be written in it.

    Raises:
        NotADirectoryError: If the folder, or a folder above it, is a file.
        PermissionError: If it can't be created or written in.
    """
    blocking = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if not blocking.is_dir():
        raise NotADirectoryError(
            f"folder {str(folder)!r} can't hold checkpoints: {str(blocking)!r} is a "
            "file; choose another folder, or move that file away"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PermissionError(
            f"folder {str(folder)!r} can't be written ({error.strerror}); choose "
            "another folder, or give this user the right to write there"
        ) from error
