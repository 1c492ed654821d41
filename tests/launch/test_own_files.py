"""Are a failing disk's operations tried again, and does a log never end a run?"""

import errno
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxpar.launch import own_files
from jaxpar.launch.own_files import (
    append,
    attempted,
    exists,
    is_file,
    is_folder,
    names_in,
    pauses,
    read,
    read_json,
    retried,
    set_aside,
    unwritten,
    write_whole,
)


class Slept:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now, self.pauses = 0.0, []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def options(self) -> dict[str, Any]:
        return {"clock": lambda: self.now, "sleep": self.sleep}


def failing(times: int, number: int = errno.EIO) -> Any:
    """A function that fails a number of times, then returns how often it was called."""
    calls = []

    def call(*_: Any, **__: Any) -> int:
        calls.append(None)
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return len(calls)

    return call


@pytest.mark.parametrize(
    "name", ["EIO", "ESTALE", "EINTR", "ENOSPC", "EAGAIN", "ETIMEDOUT", "EDQUOT"]
)
def test_transient_error_is_tried_again_with_growing_pauses(name: str) -> None:
    slept = Slept()
    call = failing(4, getattr(errno, name))
    assert retried(call, Path("f"), seconds=60.0, **slept.options()) == 5
    assert len(slept.pauses) == 4
    assert all(b == 2 * a for a, b in zip(slept.pauses, slept.pauses[1:], strict=False))


def test_time_is_bounded_and_the_error_names_the_file() -> None:
    slept = Slept()
    with pytest.raises(OSError, match=r"Input/output error: '/a/f'") as error:
        retried(failing(10**9), Path("/a/f"), seconds=60.0, **slept.options())
    assert error.value.errno == errno.EIO
    assert 50 < slept.now <= 60


def test_other_errors_are_raised_at_once(tmp_path: Path) -> None:
    slept = Slept()
    for number in (errno.ENOENT, errno.EACCES, errno.EROFS, errno.EEXIST):
        with pytest.raises(OSError, match=os.strerror(number)):
            retried(failing(1, number), tmp_path, seconds=60.0, **slept.options())
    assert not slept.pauses


def test_inner_operation_is_left_to_the_outer_one() -> None:
    """Otherwise each try of the outer one would take the inner one's whole time."""
    inner, outer = Slept(), Slept()
    call = failing(2)

    def operation() -> int:
        return retried(call, Path("f"), seconds=60.0, **inner.options())

    assert retried(operation, Path("f"), seconds=60.0, **outer.options()) == 3
    assert (len(inner.pauses), len(outer.pauses)) == (0, 2)


def test_pauses_sum_up_to_the_time() -> None:
    found = list(pauses(60.0))
    assert sum(found) == pytest.approx(60)
    assert found[:-1] == sorted(found[:-1])
    assert list(pauses(0.0)) == []


def test_what_can_be_done_without_warns_once_and_is_tried_once_a_call(
    tmp_path: Path,
) -> None:
    path, calls = tmp_path / "f", []

    def fail() -> None:
        calls.append(None)
        raise OSError(errno.EIO, "Input/output error")

    with pytest.warns(UserWarning, match=re.escape(repr(str(path)))):
        assert not attempted(fail, path)
    first = len(calls)
    assert first > 1
    assert not attempted(fail, path)
    assert len(calls) == first + 1
    assert attempted(lambda: None, path)
    with pytest.warns(UserWarning, match="goes on without it"):
        attempted(fail, path)
    attempted(lambda: None, path)


def test_lines_wait_for_their_disk_and_come_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    append(path, "1\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing(10**9, errno.ENOSPC))
        with pytest.warns(UserWarning, match=r"log.*No space left"):
            append(path, "2\n")
        append(path, "3\n")
    assert (path.read_text(), unwritten(path)) == ("1\n", 2)
    append(path, "4\n")
    assert (path.read_text(), unwritten(path)) == ("1\n2\n3\n4\n", 0)


def test_line_that_was_written_in_part_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "log", Path.open
    append(path, "first\n")
    left = [3]

    class Torn:
        def __init__(self, file: Any):
            self.file = file

        def __enter__(self) -> "Torn":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: memoryview) -> int:
            if not left:
                return self.file.write(data)
            if left[0] == 0:
                left.pop()
                raise OSError(errno.EIO, "Input/output error")
            part, left[0] = left[0], 0
            return self.file.write(data[:part])

    monkeypatch.setattr(Path, "open", lambda *a, **k: Torn(real(*a, **k)))
    append(path, "second\n")
    assert path.read_text() == "first\nsecond\n"


def test_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    write_whole(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(2))
        write_whole(path, b"new", durable=True)
        assert path.read_text() == "new"
        patch.setattr(os, "fsync", failing(10**9))
        with pytest.raises(OSError, match="Input/output error"):
            write_whole(path, "newer", durable=True)
    assert read(path) == b"new"


def test_nothing_is_read_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{")
    for path in (tmp_path / "none", tmp_path / "file" / "below"):
        assert read(path) is None
        assert read_json(path) is None
        assert not any(asks(path) for asks in (exists, is_file, is_folder))
        assert names_in(path) == []
    assert read_json(tmp_path / "file") is None
    assert is_file(tmp_path / "file")
    assert is_folder(tmp_path)
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize("question", [exists, is_file, is_folder])
def test_question_that_a_disk_cannot_answer_raises(
    question: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Path.exists` answers False."""
    real = os.stat
    monkeypatch.setattr(os, "stat", failing(10**9))
    with pytest.raises(OSError, match="Input/output error"):
        question(tmp_path)
    monkeypatch.setattr(os, "stat", real)


def test_set_aside_takes_a_free_name(tmp_path: Path) -> None:
    for name in ("f.damaged", "f.damaged.2"):
        (tmp_path / "f").write_text("x")
        assert set_aside(tmp_path / "f").name == name


def test_threads_do_not_share_what_they_are_inside() -> None:
    found = []

    def other() -> None:
        found.append(retried(failing(1), Path("f"), sleep=lambda _: None))

    def operation() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    retried(operation, Path("f"))
    assert found == [2]
    assert own_files.SECONDS < 1, "tests are impatient"
