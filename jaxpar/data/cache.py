"""Who builds what is slow to make, where many processes need it at once?

One process builds a folder under a temporary name and renames it; the others of the
host wait for its lock. Where the file system has no locks, or on several hosts, each
builds its own, and the first to rename wins. A process that is killed leaves a
temporary folder, which nothing reads, and the next builder of that host deletes it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar.data.tokens import is_first
from jaxpar.launch.own_files import exists, is_folder, read_json, retried, write_whole
from jaxpar.progress import waiting

VERSION = 3
"""Of what is in a folder; another one is built anew."""

FOLDER = ".jaxpar"
"""Beside the data; hidden, so that it is not read as data."""

_INDEX = "index.json"


def cached(
    root: Path, key: Mapping[str, Any], build: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """Find a folder, or build it.

    Args:
      root: of all such folders.
      key: all that the content depends on, of JSON's types.
      build: fills an empty folder and returns its index, of JSON's types.

    Returns:
      (folder, index).

    Raises:
      ValueError: if the root can't be written and the folder isn't there.
    """
    key = {"version": VERSION, **key}
    text = json.dumps(key, sort_keys=True)
    folder = root / hashlib.sha256(text.encode()).hexdigest()[:24]
    index = _index_of(folder)
    if index is None:
        _require_writable(root)
        with _locked(folder.with_suffix(".lock")) as is_alone:
            index = _index_of(folder)
            if index is None:
                if is_alone:
                    _delete_left_over(folder)
                index = _build(folder, key, build)
    return folder, index


def root_for(sources: Sequence[Path], cache: str | os.PathLike[str] | None) -> Path:
    """Choose the folder of the caches of some data.

    Args:
      sources: files or folders of the data.
      cache: the user's choice; None for a hidden folder beside the first of them.
    """
    if cache is not None:
        return Path(cache)
    first = sources[0]
    if exists(first.with_name(_INDEX)):  # Itself of a cache: beside it.
        return first.parent.parent
    return (first if is_folder(first) else first.parent) / FOLDER


def identity_of(files: Sequence[tuple[str, Path]]) -> list[list[Any]]:
    """What is the same as long as files are: their names, sizes and times."""
    found = [(name, path.stat()) for name, path in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]


def _index_of(folder: Path) -> dict[str, Any] | None:
    """What the builder of a folder returned; None where it is missing or damaged."""
    try:
        found = read_json(folder / _INDEX)
        return found["built"] if found["sha256"] == _sha256(found["built"]) else None
    except (LookupError, TypeError, UnicodeEncodeError):
        return None


def _sha256(built: Any) -> str:
    return hashlib.sha256(json.dumps(built, sort_keys=True).encode()).hexdigest()


def unfinished(path: Path) -> Path:
    """A name beside a path, of this host, which no other process or thread takes."""
    # Not `tempfile`, whose folders and files nobody else may read.
    return path.with_name(
        f"{path.name}.{socket.gethostname()}.{secrets.token_hex(8)}.tmp"
    )


def _build(
    folder: Path, key: Mapping[str, Any], build: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    own = unfinished(folder)
    retried(own.mkdir, own)
    try:
        built = build(own)
        index = {"key": key, "built": built, "sha256": _sha256(built)}
        write_whole(own / _INDEX, json.dumps(index, indent=2), durable=True)
        try:
            retried(lambda: own.rename(folder), folder)
        except OSError:
            # Another host was faster, and its folder is as good.
            built = _index_of(folder)
            if built is None:
                raise
            return built
        return index["built"]
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _require_writable(root: Path) -> None:
    try:
        retried(lambda: root.mkdir(parents=True, exist_ok=True), root)
        probe = unfinished(root / ".probe")
        retried(probe.touch, probe)
        retried(lambda: probe.unlink(missing_ok=True), probe)
    except OSError as error:
        raise ValueError(
            f"cache: '{root}' can't be written ({error.strerror}), where the tokens of "
            "the corpus would be kept; give a folder with room (cache=, --data-cache)."
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a lock, which ends with the process at the latest; False without locks."""
    with retried(lambda: path.open("a"), path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"waiting for another process to write {path.with_suffix('')}"
            with waiting(what, shown=is_first()):
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # No locks here: each builds its own.
            yield False
            return
        yield True


def _delete_left_over(folder: Path) -> None:
    """Delete what was half built by processes of this host, or half deleted."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in folder.parent.glob(f"{folder.name}.{socket.gethostname()}.*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
