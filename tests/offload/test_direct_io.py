"""Are bytes read as they were written, and do errors name the file?"""

import errno
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from jaxpar.offload import direct_io
from jaxpar.offload.direct_io import aligned_buffer, allocate, padded, read, sync, write


def filled(size: int, seed: int = 0) -> np.ndarray:
    buffer = aligned_buffer(size)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, buffer.size, np.uint8)
    return buffer


def test_sizes_are_padded_to_pages() -> None:
    assert [padded(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert aligned_buffer(5000).ctypes.data % 4096 == 0


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file, data, found = tmp_path / "x", filled(3 << 12), aligned_buffer(2 << 12)
    allocate(file, 4 << 12)
    write(file, 1 << 12, data)
    sync(file)
    read(file, 2 << 12, found)
    np.testing.assert_array_equal(found, data[1 << 12 :])
    assert file.stat().st_size == 4 << 12


def test_a_file_system_without_direct_io_is_used(tmp_path: Path) -> None:
    opened = os.open

    def refuses(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *args)

    file, data = tmp_path / "x", filled(4096)
    allocate(file, 4096)
    with mock.patch.object(os, "open", refuses):
        write(file, 0, data)
    assert file.read_bytes() == data.tobytes()


@pytest.mark.parametrize(
    ("call", "number", "said"),
    [
        ("preadv", errno.EIO, "reading"),
        ("pwritev", errno.EIO, "writing"),
        ("posix_fallocate", errno.ENOSPC, "allocating"),
        ("fsync", errno.EIO, "syncing"),
    ],
)
def test_errors_name_the_file_and_what_was_done(call, number, said, tmp_path) -> None:
    file = tmp_path / "x"
    allocate(file, 4096)
    error = OSError(number, os.strerror(number))
    calls = {
        "reading": lambda: read(file, 0, aligned_buffer(4096)),
        "writing": lambda: write(file, 0, filled(4096)),
        "allocating": lambda: allocate(file, 4096),
        "syncing": lambda: sync(file),
    }
    with (
        mock.patch.object(direct_io.os, call, side_effect=error),
        pytest.raises(OSError, match=f"{said} the state that is on disk") as found,
    ):
        calls[said]()
    assert (found.value.errno, found.value.filename) == (number, str(file))


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    allocate(tmp_path / "x", 4096)
    with pytest.raises(OSError, match="ends 4096 bytes early"):
        read(tmp_path / "x", 0, aligned_buffer(8192))
