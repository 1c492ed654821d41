"""Is what is read from disk what is there, and is a changed file an error?"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data.disk_array import ChangedDataError, DiskArray

ROOT = Path(__file__).resolve().parents[2]

# A run whose corpus is cut off while it reads; with a memory map, SIGBUS kills it.
TRUNCATES = """
import os, sys
from jaxpar.data import Loader, read_tokens
loader = Loader(read_tokens(sys.argv[1]), batch_size=2, seq_len=64)
next(loader)
os.truncate(sys.argv[1], 4096)
try:
    for _ in range(50):
        next(loader)
except OSError as error:
    print(error)
"""


def stored(
    folder: Path, array: np.ndarray, before: bytes = b"", name: str = "array"
) -> Path:
    path = folder / name
    path.write_bytes(before + array.tobytes())
    return path


@given(st.data())
def test_slice_is_that_of_numpy(tmp_path_factory, data):
    array = np.arange(data.draw(st.integers(0, 50)), dtype="<i4")
    offset = data.draw(st.integers(0, 9))
    path = stored(tmp_path_factory.mktemp("slice"), array, b"x" * offset)
    on_disk = DiskArray(path, "<i4", offset=offset)
    bound = st.none() | st.integers(-60, 60)
    where = slice(data.draw(bound), data.draw(bound))
    np.testing.assert_array_equal(on_disk[where], array[where])
    assert on_disk.shape == array.shape
    assert on_disk[:].tolist() == array.tolist()


def test_slice_is_a_copy_that_may_be_written(tmp_path):
    array = DiskArray(stored(tmp_path, np.arange(9, dtype="uint16")), "uint16")
    array[2:4][:] = 0
    assert array[2:4].tolist() == [2, 3]


def test_only_slices_without_a_step(tmp_path):
    array = DiskArray(stored(tmp_path, np.arange(9, dtype="uint16")), "uint16")
    with pytest.raises(ValueError, match="must have step 1, not 2"):
        array[::2]


def test_run_whose_corpus_is_truncated_says_so_and_lives(tmp_path):
    path = tmp_path / "ids.bin"
    np.arange(1 << 20, dtype="<u2").tofile(path)
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATES, str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert re.search(
        rf"'{path}' was written since it was opened; it has 4,096 bytes, before "
        r"2,097,152\. Bring the former file back",
        done.stdout,
    )


@pytest.mark.parametrize("change", ["overwritten", "appended", "replaced"])
def test_file_that_is_written_is_an_error_at_the_next_read(tmp_path, change):
    path = stored(tmp_path, np.arange(9, dtype="uint16"))
    array = DiskArray(path, "uint16")
    part = array.cut(3, 6)
    assert part[:].tolist() == [3, 4, 5]
    if change == "replaced":
        os.replace(stored(tmp_path, np.arange(1, 10, dtype="uint16"), name="b"), path)
    with path.open("ab" if change == "appended" else "r+b") as file:
        file.write(b"xx")
    os.utime(path, ns=(0, 5))  # The clock of the file system may be coarse.
    size = "20 bytes, before 18" if change == "appended" else "still 18 bytes"
    said = rf"'{path}' was written since .*; it has {size}\. Bring the former file back"
    for each in (array, part):
        with pytest.raises(ChangedDataError, match=said):
            each[:1]


def test_file_that_is_gone_is_named(tmp_path):
    path = stored(tmp_path, np.arange(9, dtype="uint16"))
    array = DiskArray(path, "uint16")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=str(path)):
        array[:1]
