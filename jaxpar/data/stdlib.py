"""Which text is on every machine? The source of Python's own standard library."""

import pathlib
import sysconfig
import zlib
from collections.abc import Sequence

import numpy as np

from jaxpar.data.files import find_files
from jaxpar.data.tokens import Tokens

_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__"}
    | {"test", "tests", "idle_test", "idlelib", "lib2to3"}
)
_HELD_OUT_ONE_IN = 20


def stdlib_source() -> tuple[Tokens, Tokens]:
    """Read the running interpreter's standard library as bytes, in two splits.

    Files are sorted by their path in the library. A file is held out if the CRC-32 of
    that path is a multiple of 20, so that a file stays in its split when others are
    added or removed. Installed packages, tests and build records of the machine are
    excluded. Another Python version has another corpus: compare runs by ``sha256``.

    Returns:
      (train, heldout); about one file in 20 is held out.

    Raises:
      FileNotFoundError: if this interpreter comes without its source.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    train, heldout = [], []
    for name, path in find_files(root, "*.py", _EXCLUDED_FOLDERS):
        if not _is_build_record(name):
            is_heldout = zlib.crc32(name.encode()) % _HELD_OUT_ONE_IN == 0
            (heldout if is_heldout else train).append((name, path))
    if not train or not heldout:
        raise FileNotFoundError(
            f"the standard library at '{root}' has {len(train) + len(heldout)} source "
            "files, too few for two splits; use a Python with its .py files, or give "
            "your own text to read_tokens()."
        )
    return _join(train), _join(heldout)


def _is_build_record(name: str) -> bool:
    """Whether a file holds paths and flags of the machine that built Python."""
    return name.startswith(("config-", "_sysconfigdata"))


def _join(files: Sequence[tuple[str, pathlib.Path]]) -> Tokens:
    """Read small files into memory as one sequence of bytes, each a document."""
    corpus, starts = bytearray(), set()
    for _, path in files:
        starts.add(len(corpus))
        corpus += path.read_bytes()
    return Tokens(
        (np.frombuffer(corpus, np.uint8),),
        tuple(name for name, _ in files),
        256,
        num_bytes=len(corpus),
        starts=np.array(sorted(starts - {len(corpus)}), np.int64),
    )
