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

from jaxpar.data.block_hashes import BLOCK_BYTES
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


def stored(folder: Path, array: np.ndarray, before: bytes = b"") -> Path:
    path = folder / "array"
    path.write_bytes(before + array.tobytes())
    return path


def hashed(path: Path, dtype: str = "uint16", **where: int) -> DiskArray:
    array = DiskArray(path, dtype, **where)
    array.scan(lambda _: None)
    return array


def overwrite(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


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
    assert np.asarray(on_disk).tolist() == array.tolist()


def test_slice_is_a_copy_that_may_be_written(tmp_path):
    array = hashed(stored(tmp_path, np.arange(9, dtype="uint16")))
    array[2:4][:] = 0
    assert array[2:4].tolist() == [2, 3]


def test_part_of_an_array_is_read_and_hashed_alone(tmp_path):
    path = stored(tmp_path, np.arange(9, dtype="uint16"))
    part = DiskArray(path, "uint16").cut(3, 6)
    part.scan(lambda _: None)
    overwrite(path, 0)
    assert part[:].tolist() == [3, 4, 5]


def test_only_slices_without_a_step(tmp_path):
    array = DiskArray(stored(tmp_path, np.arange(9, dtype="uint16")), "uint16")
    with pytest.raises(ValueError, match="must have step 1, not 2"):
        array[::2]
    with pytest.raises(ValueError, match="is on disk: an array of it is a copy"):
        np.asarray(array, copy=False)


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
        rf"'{path}' ends at byte 4,096, but [\d,]+ bytes from [\d,]+ on were there when"
        r" it was opened: it was truncated. Bring the former file back",
        done.stdout,
    )


@pytest.mark.parametrize("block", [0, 1, 2])
def test_block_that_changed_is_found_when_it_is_first_read(tmp_path, block):
    ids = np.arange(BLOCK_BYTES + 10, dtype="uint16")  # Two blocks and a short one.
    path = stored(tmp_path, ids, before=b"head")
    array = hashed(path, offset=4)
    overwrite(path, 4 + block * BLOCK_BYTES + 7)
    size = BLOCK_BYTES // 2
    for other in {0, 1, 2} - {block}:
        start = other * size
        np.testing.assert_array_equal(
            array[start + 1 : start + 3], ids[start + 1 :][:2]
        )
    at = 4 + block * BLOCK_BYTES
    with pytest.raises(
        ChangedDataError,
        match=f"'{path}' was changed since the run began: block {block}, from byte "
        f"{at:,}, has another hash. Bring the former file back",
    ):
        array[block * size : block * size + 1]


def test_block_is_compared_once(tmp_path):
    path = stored(tmp_path, np.arange(9, dtype="uint16"))
    array = hashed(path)
    assert array[:2].tolist() == [0, 1]
    overwrite(path, 0)
    assert array[:2].tolist() == [1, 1], "read before: not compared again"
    with pytest.raises(ChangedDataError, match="block 0, from byte 0"):
        array.with_hashes(array.hashes)[:2]


def test_file_that_is_gone_is_named(tmp_path):
    array = hashed(path := stored(tmp_path, np.arange(9, dtype="uint16")))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=str(path)):
        array[:1]
