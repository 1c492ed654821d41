"""What is the corpus: one sequence of token ids over files, identified by its hash.

Token files are memory-mapped and never joined, so a corpus larger than memory only
costs what is read of it.
"""

import bisect
import dataclasses
import fnmatch
import functools
import hashlib
import itertools
import os
import pathlib
from collections.abc import Container, Sequence

import numpy as np
from jaxtyping import Integer
from numpy.typing import DTypeLike

_HASH_CHUNK = 1 << 22
"""Elements hashed at a time: enough for the disk's speed, little memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """Token ids in a fixed order, possibly over several arrays on disk.

    Attributes:
      parts: 1-D integer arrays of one dtype, read as one sequence; memory maps for data
        on disk.
      files: the files of the ids, in order, for messages and records.
      vocab_size: one more than the largest possible id, where the data's format
        determines it (256 for bytes); None otherwise.
      num_bytes: of the text that the ids stand for; None if unknown.

    Raises:
      ValueError: if a part is not 1-D, not of integers or of another dtype than the
        first, or there is no token at all.

    Example:
      >>> tokens = Tokens((np.arange(5), np.arange(5, 8)), files=("a", "b"))
      >>> len(tokens), tokens.read(3, 7)
      (8, array([3, 4, 5, 6]))
    """

    parts: tuple[np.ndarray, ...]
    files: tuple[str, ...]
    vocab_size: int | None = None
    num_bytes: int | None = None

    def __post_init__(self):
        named = len(self.files) == len(self.parts)
        for index, part in enumerate(self.parts):
            name = repr(self.files[index]) if named else f"parts[{index}]"
            if part.ndim != 1:
                raise ValueError(
                    f"{name} has shape {part.shape}, but a corpus is one run of token "
                    "ids; save it with one dim (array.reshape(-1))."
                )
            if not np.issubdtype(part.dtype, np.integer):
                raise ValueError(
                    f"{name} holds {part.dtype}, but token ids must be integers; save "
                    "it as uint16, or uint32 for a vocabulary over 65,536."
                )
            if part.dtype != self.parts[0].dtype:
                raise ValueError(
                    f"{name} holds {part.dtype} and the part before it "
                    f"{self.parts[0].dtype}; save all parts of a corpus in one dtype."
                )
        if not len(self):
            raise ValueError(
                f"the corpus of {len(self.files)} files holds no tokens; give at least "
                "one file that is not empty."
            )

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [0, *itertools.accumulate(len(part) for part in self.parts[:-1])]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the ids as they are stored."""
        return self.parts[0].dtype

    @property
    def array(self) -> Integer[np.ndarray, "_"]:
        """All ids as one array: in place for one part, otherwise joined in memory."""
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)

    def read(self, start: int, stop: int) -> Integer[np.ndarray, "_"]:
        """Copy the ids from `start` up to `stop` into memory, across parts.

        Args:
          start: position of the first id.
          stop: position after the last; clipped at the end, as in a slice.

        Returns:
          The ids, in their stored dtype.
        """
        first = bisect.bisect_right(self._starts, start) - 1
        last = max(bisect.bisect_left(self._starts, stop), first + 1)
        begun = zip(self._starts[first:last], self.parts[first:last], strict=True)
        return np.concatenate(
            [part[max(start - at, 0) : max(stop - at, 0)] for at, part in begun]
        )

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the corpus bytes in order, in hexadecimal; computed when first read.

        It reads the whole corpus once. For text it is the hash of the files
        concatenated, for a ``.bin`` file the hash of the file.
        """
        digest = hashlib.sha256()
        for part in self.parts:
            for start in range(0, len(part), _HASH_CHUNK):
                digest.update(np.ascontiguousarray(part[start : start + _HASH_CHUNK]))
        return digest.hexdigest()


def read_tokens(
    *paths: str | os.PathLike[str], include: str = "*", dtype: DTypeLike | None = None
) -> Tokens:
    """Read a corpus: text as bytes, or token files, from files and folders.

    A folder stands for the files below it whose relative path matches `include`, sorted
    by that path, without hidden ones. The suffix determines the format: ``.npy`` is an
    array of ids, ``.bin`` is raw ids, anything else is text. Text is read as bytes; one
    text file is memory-mapped, several are joined in memory.

    Args:
      *paths: files and folders, in reading order.
      include: shell-style pattern for the files of folders (``"*.py"``); a star also
        matches slashes.
      dtype: of the ids in a ``.bin`` file; None for little-endian uint16.

    Returns:
      The corpus, memory-mapped where possible.

    Raises:
      FileNotFoundError: if a path doesn't exist, or a folder has no matching file.
      ValueError: if there is no path, text and token files are mixed, `dtype` is not
        of integers or is given for other files than ``.bin``, a file's content does not
        match its suffix, or all files are empty.
    """
    if not paths:
        raise ValueError(
            "paths: read_tokens() was given none; give a text file, a folder, or .npy "
            "or .bin files of token ids."
        )
    found = [
        named for path in paths for named in find_files(pathlib.Path(path), include)
    ]
    kind = _single_kind(found)
    if dtype is not None and kind != ".bin":
        raise ValueError(
            f"dtype={np.dtype(dtype).name} is for .bin files, but {found[0][0]!r} is "
            f"{kind}; omit dtype."
        )
    if kind == "text":
        return join_text(found)
    if kind == ".bin":
        item = np.dtype("<u2" if dtype is None else dtype)
        parts = tuple(_map_bin(path, item) for _, path in found)
    else:
        parts = tuple(_map_npy(path) for _, path in found)
    return Tokens(parts, files=tuple(name for name, _ in found))


def find_files(
    path: pathlib.Path, include: str, left_out: Container[str] = ()
) -> list[tuple[str, pathlib.Path]]:
    """List the files that a path stands for, with their names.

    Args:
      path: a file, which stands for itself, or a folder.
      include: shell-style pattern for the relative paths of a folder's files.
      left_out: names of folders to skip, besides hidden ones.

    Returns:
      (name, path) pairs; below a folder, names are relative to it, and sorted.

    Raises:
      FileNotFoundError: if the path doesn't exist, or no file of the folder matches.
    """
    if path.is_file():
        return [(path.name, path)]
    if not path.is_dir():
        raise FileNotFoundError(
            f"paths: '{path}' does not exist; give a file or a folder (a pattern such "
            "as '*.bin' goes to include=, with the folder as the path)."
        )
    names = []
    for folder, subfolders, files in os.walk(path):
        subfolders[:] = [
            name for name in subfolders if name[0] != "." and name not in left_out
        ]
        at = pathlib.Path(folder).relative_to(path)
        names += [(at / name).as_posix() for name in files if name[0] != "."]
    found = sorted(name for name in names if fnmatch.fnmatchcase(name, include))
    if not found:
        raise FileNotFoundError(
            f"paths: folder '{path}' has no file that matches include={include!r}; "
            "give another folder or another pattern."
        )
    return [(name, path / name) for name in found]


def join_text(files: Sequence[tuple[str, pathlib.Path]]) -> Tokens:
    """Read text files as one sequence of bytes, in the order given.

    Args:
      files: (name, path) pairs.

    Returns:
      The bytes, memory-mapped if there is one file; ``vocab_size`` is 256.

    Raises:
      ValueError: if all files are empty.
    """
    names = tuple(name for name, _ in files)
    if len(files) == 1:
        text = _map_bytes(files[0][1], np.dtype(np.uint8))
        return Tokens((text,), names, 256, num_bytes=len(text))
    corpus = bytearray()
    for _, path in files:
        corpus += path.read_bytes()
    text = np.frombuffer(corpus, np.uint8)
    return Tokens((text,), names, 256, num_bytes=len(text))


def _single_kind(files: Sequence[tuple[str, pathlib.Path]]) -> str:
    """The one kind of all files: ``text``, ``.npy`` or ``.bin``."""
    example = {}
    for name, path in files:
        kind = path.suffix if path.suffix in (".npy", ".bin") else "text"
        example.setdefault(kind, name)
    if len(example) > 1:
        listing = ", ".join(f"{name!r} ({kind})" for kind, name in example.items())
        raise ValueError(
            f"paths: {listing} are of different kinds, but a corpus has one; choose "
            "one kind with include=, such as include='*.bin'."
        )
    return next(iter(example))


def _map_bytes(path: pathlib.Path, dtype: np.dtype) -> np.ndarray:
    # mmap refuses an empty file.
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")


def _map_bin(path: pathlib.Path, dtype: np.dtype) -> np.ndarray:
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
    return _map_bytes(path, dtype)


def _map_npy(path: pathlib.Path) -> np.ndarray:
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ValueError(
            f"paths: '{path}' can't be read as a .npy array of token ids ({error}); "
            "write it with numpy.save."
        ) from error
