"""How does a host compute an update: compiled C code, over all of its cores?

The C code of each kind of leaf is compiled once in a process, with the machine's own
compiler. Without one, XLA's CPU backend computes the same, with more passes through
memory.
"""

import concurrent.futures
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxpar.offload.c_code import FUNCTION

_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno")
_FLAGS += ("-fno-trapping-math", "-shared", "-fPIC")
_LEAST = 1 << 16
"""Elements for which a thread is worth its start."""

Pass = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]
"""``(arrays, scalars)``: inputs and outputs of one size, which lie in one piece of
memory each; an output may be the input that it replaces."""


def compiler() -> str | None:
    """The C compiler: cc, gcc or clang; None if there is none."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@functools.cache
def compiled(source: str) -> Pass:
    """Compile a source of `jaxpar.offload.c_code` and load it.

    Returns:
      The pass, which all cores share.

    Raises:
      OSError: if there is no compiler, or it fails.
    """
    cc = compiler()
    if cc is None:
        raise OSError("there is no C compiler (cc, gcc or clang)")
    with tempfile.TemporaryDirectory(prefix="jaxpar-") as folder:
        code, library = Path(folder, "update.c"), Path(folder, "update.so")
        code.write_text(source)
        command = [cc, *_FLAGS, "-o", str(library), str(code), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{cc} failed: {done.stderr.strip()[:500]}")
        function = getattr(ctypes.CDLL(str(library)), FUNCTION)
    pointers = ctypes.POINTER(ctypes.c_void_p)
    function.argtypes = [ctypes.c_int64, ctypes.c_int64, pointers, pointers]
    function.restype = None

    def run(arrays: Sequence[np.ndarray], scalars: Sequence[np.ndarray]) -> None:
        given = _pointers(arrays), _pointers(scalars)
        spread(lambda begin, end: function(begin, end, *given), arrays[0].size)

    return run


def spread(work: Callable[[int, int], None], size: int) -> None:
    """Call ``work(begin, end)`` for equal parts of ``range(size)``, one a core."""
    parts = max(1, min(cores(), size // _LEAST))
    edges = [size * part // parts for part in range(parts + 1)]
    if parts == 1:
        work(0, size)
    else:
        list(_threads().map(work, edges[:-1], edges[1:]))


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS knows no affinity.


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(cores(), "jaxpar-update")


def _pointers(arrays: Sequence[np.ndarray]) -> ctypes.Array:
    found = [array.ctypes.data for array in arrays]
    return (ctypes.c_void_p * max(1, len(found)))(*found)
