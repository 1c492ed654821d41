"""Which files does a path stand for, in which format, and which of them hold ids?"""

import fnmatch
import json
import os
from collections.abc import Container, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from jaxpar.data.disk_array import DiskArray
from jaxpar.data.text_files import read_text
from jaxpar.data.tokens import Tokens

Named = tuple[str, Path]
"""A file's name, for messages and records, and its path."""

_ROWS = (
    *(f"{name}{gz}" for name in (".jsonl", ".ndjson", ".json") for gz in ("", ".gz")),
    *(".parquet", ".arrow"),
)


def read_tokens(
    *paths: str | os.PathLike[str], include: str = "*", dtype: DTypeLike | None = None
) -> Tokens:
    """Read one corpus of text, as bytes, or of token files, from files and folders.

    A folder stands for the files below it whose relative path matches `include`, sorted
    by that path, without hidden ones. The suffix determines the format: ``.npy`` is an
    array of ids, ``.bin`` is raw ids, anything else is text in UTF-8, of which each
    file is a document. Rows (``.jsonl``, ``.parquet``) are read by
    `jaxpar.data.open_corpus`.

    Args:
      *paths: files and folders, in reading order.
      include: shell-style pattern for the files of folders (``"*.py"``); a star also
        matches slashes.
      dtype: of the ids in a ``.bin`` file; None for little-endian uint16.

    Returns:
      The corpus, which is read from disk as it is used.

    Raises:
      FileNotFoundError: if a path doesn't exist, or a folder has no matching file.
      ValueError: if there is no path, kinds of files are mixed, `dtype` is not of
        integers or is given for other files than ``.bin``, a file's content does not
        match its suffix, text is not UTF-8, or all files are empty.
    """
    found, kind = find_corpus(paths, include)
    if dtype is not None and kind != ".bin":
        raise ValueError(
            f"dtype={np.dtype(dtype).name} is for .bin files, but {found[0][0]!r} is "
            f"{kind}; omit dtype."
        )
    if kind == "rows":
        raise ValueError(
            f"paths: {found[0][0]!r} has a document in each row; "
            "jaxpar.data.open_corpus reads it."
        )
    return read_text(found) if kind == "text" else open_ids(found, kind, dtype)


def find_corpus(
    paths: Sequence[str | os.PathLike[str]], include: str = "*"
) -> tuple[list[Named], str]:
    """List the files of a corpus, and determine their kind.

    Args:
      paths: files and folders, in reading order.
      include: as in `read_tokens`.

    Returns:
      (files, kind): "text", "rows", ".npy" or ".bin".

    Raises:
      FileNotFoundError: as in `read_tokens`.
      ValueError: if there is no path, or files are of several kinds.
    """
    if not paths:
        raise ValueError(
            "paths: there is none; give a text file, a folder, rows (.jsonl, .parquet) "
            "or .npy or .bin files of token ids."
        )
    found = [named for path in paths for named in find_files(Path(path), include)]
    return found, _single_kind(found)


def find_files(path: Path, include: str, left_out: Container[str] = ()) -> list[Named]:
    """List the files that a path stands for, with their names.

    Args:
      path: a file, which stands for itself, a folder, or a folder that Hugging Face's
        ``Dataset.save_to_disk`` wrote, which stands for its data.
      include: shell-style pattern for the relative paths of a folder's files.
      left_out: names of folders to skip, besides hidden ones.

    Returns:
      (name, path) pairs; below a folder, names are relative to it, and sorted.

    Raises:
      FileNotFoundError: if the path doesn't exist, or no file of the folder matches.
      ValueError: if the folder has several saved datasets.
    """
    if path.is_file():
        return [(path.name, path)]
    if not path.is_dir():
        raise FileNotFoundError(
            f"paths: '{path}' does not exist; give a file or a folder (a pattern such "
            "as '*.bin' goes to include=, with the folder as the path)."
        )
    saved = _saved_dataset(path)
    if saved:
        return saved
    names = []
    for folder, subfolders, files in os.walk(path):
        subfolders[:] = [
            name for name in subfolders if name[0] != "." and name not in left_out
        ]
        at = Path(folder).relative_to(path)
        names += [(at / name).as_posix() for name in files if name[0] != "."]
    found = sorted(name for name in names if fnmatch.fnmatchcase(name, include))
    if not found:
        raise FileNotFoundError(
            f"paths: folder '{path}' has no file that matches include={include!r}; "
            "give another folder or another pattern."
        )
    return [(name, path / name) for name in found]


def _saved_dataset(path: Path) -> list[Named]:
    """The data of a folder by ``save_to_disk``, in its order; none of another one."""
    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise ValueError(
            f"paths: '{path}' holds the datasets {', '.join(splits)}; give the folder "
            f"of one of them, such as '{path / splits[0]}'."
        )
    state = path / "state.json"
    if not (state.exists() and (path / "dataset_info.json").exists()):
        return []
    files = [each["filename"] for each in json.loads(state.read_text())["_data_files"]]
    return [(f"{path.name}/{name}", path / name) for name in files]


def kind_of(path: Path) -> str:
    """The kind of a file by its suffix: "rows", ".npy", ".bin", or else "text"."""
    if path.name.lower().endswith(_ROWS):
        return "rows"
    return path.suffix if path.suffix in (".npy", ".bin") else "text"


def _single_kind(files: Sequence[Named]) -> str:
    """The one kind of all files."""
    example = {}
    for name, path in files:
        example.setdefault(kind_of(path), name)
    if len(example) > 1:
        listing = ", ".join(f"{name!r} ({kind})" for kind, name in example.items())
        raise ValueError(
            f"paths: {listing} are of different kinds, but a corpus has one; give the "
            "files of one kind, such as folder/*.bin."
        )
    return next(iter(example))


def open_ids(
    files: Sequence[Named], kind: str, dtype: DTypeLike | None = None
) -> Tokens:
    """Open files of token ids.

    Args:
      files: (name, path) pairs.
      kind: ".bin" or ".npy".
      dtype: of the ids in a ``.bin`` file; None for little-endian uint16.

    Returns:
      The ids as one sequence.

    Raises:
      ValueError: as in `read_tokens`.
    """
    if kind == ".bin":
        item = np.dtype("<u2" if dtype is None else dtype)
        parts = tuple(_open_bin(path, item) for _, path in files)
    else:
        parts = tuple(_open_npy(path) for _, path in files)
    return Tokens(parts, files=tuple(name for name, _ in files))


def cut_ids(tokens: Tokens, share: float) -> tuple[Tokens, Tokens]:
    """Cut ids without documents in two: the end is held out.

    Args:
      tokens: on disk.
      share: of the ids that is held out.

    Returns:
      (train, heldout).

    Raises:
      ValueError: if one of them is empty.
    """
    at, before, after = round(len(tokens) * (1 - share)), [], []
    at = min(max(at, 1), len(tokens) - 1)
    for part, name in zip(tokens.parts, tokens.files, strict=True):
        cut = min(max(at, 0), len(part))
        assert isinstance(part, DiskArray), "token files are on disk"
        before += [(part.cut(0, cut), name)] if cut else []
        after += [(part.cut(cut, len(part)), name)] if cut < len(part) else []
        at -= len(part)
    if not before or not after:
        raise ValueError(
            f"heldout: {len(tokens):,} tokens are too few to hold {share:.0%} of them "
            "out; give more data, or held-out files (--heldout)."
        )
    train, heldout = (
        Tokens(tuple(part for part, _ in own), tuple(name for _, name in own))
        for own in (before, after)
    )
    return train, heldout


def _open_bin(path: Path, dtype: np.dtype) -> DiskArray:
    if not np.issubdtype(dtype, np.integer):
        raise ValueError(
            f"dtype={dtype.name} must be an integer dtype, because .bin files hold "
            "token ids; give the one the file was written with, such as 'uint16'."
        )
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise ValueError(
            f"paths: '{path}' has {size} bytes, which is not a multiple of the "
            f"{dtype.itemsize} bytes of a {dtype.name}; give the dtype= it was written "
            "with, or write the file again if it was truncated."
        )
    return DiskArray(path, dtype)


def _open_npy(path: Path) -> DiskArray | np.ndarray:
    try:
        header = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ValueError(
            f"paths: '{path}' can't be read as a .npy array of token ids ({error}); "
            "write it with numpy.save."
        ) from error
    if header.ndim != 1:
        return header  # Which is refused, with its shape.
    assert isinstance(header, np.memmap)
    return DiskArray(path, header.dtype, offset=header.offset, length=len(header))
