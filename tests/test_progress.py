"""Does what takes long say so, on standard error, and nothing else?"""

import io
import re
import threading
import time

import pytest
from rich.console import Console

from jaxpar import progress


@pytest.fixture
def said(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> io.StringIO:
    said = io.StringIO()
    is_terminal = "terminal" in request.node.name
    console = Console(file=said, force_terminal=is_terminal, soft_wrap=True)
    monkeypatch.setattr(progress, "_console", lambda: console)
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.02)
    return said


def test_what_ends_soon_prints_nothing(capsys: pytest.CaptureFixture) -> None:
    with progress.counting("hashing", 2) as advance, progress.waiting("compiling"):
        advance(1)
    assert capsys.readouterr() == ("", "")


def test_count_is_printed_in_its_unit(said: io.StringIO) -> None:
    with progress.counting("hashing a", 4_000_000, unit="B") as advance:
        time.sleep(0.03)
        advance(1_000_000)
        advance(3_000_000)
    first, last = said.getvalue().splitlines()
    assert first == "hashing a: 1.0 of 4.0 MB"
    assert last == "hashing a: 4.0 of 4.0 MB in 0 s"


def test_rows_are_counted_without_a_total(said: io.StringIO) -> None:
    with progress.counting("reading", None, unit="rows") as advance:
        time.sleep(0.03)
        advance(1200)
    assert said.getvalue().splitlines()[0] == "reading: 1,200 rows"


def test_wait_says_how_long_it_takes(
    said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.03)
    with progress.waiting("compiling the step", expected="about 40 s"):
        time.sleep(0.2)
    lines = said.getvalue().splitlines()
    assert lines[0] == "compiling the step, about 40 s"
    assert lines[1] == "compiling the step, about 40 s (0 s)"
    assert lines[-1] == "compiling the step: 0 s"


def test_error_ends_both_without_saying_done(said: io.StringIO) -> None:
    before = set(threading.enumerate())
    with pytest.raises(KeyError), progress.waiting("compiling"):  # noqa: PT012
        time.sleep(0.05)
        raise KeyError
    with pytest.raises(KeyError), progress.counting("reading", 9) as advance:  # noqa: PT012
        time.sleep(0.05)
        advance(1)
        raise KeyError
    assert said.getvalue().splitlines() == ["compiling", "reading: 1 of 9"]
    assert set(threading.enumerate()) <= before, "no thread is left"


def test_other_processes_print_nothing(said: io.StringIO) -> None:
    with (
        progress.counting("reading", 9, shown=False) as advance,
        progress.waiting("compiling", shown=False),
    ):
        time.sleep(0.05)
        advance(1)
    assert not said.getvalue()


def test_terminal_gets_a_bar_that_goes(said: io.StringIO) -> None:
    with progress.counting("reading", 4, unit="rows") as advance:
        time.sleep(0.03)
        advance(1)
        time.sleep(0.3)
    with progress.waiting("compiling"):
        time.sleep(0.3)
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", said.getvalue())
    assert "1/4" in text
    assert "compiling" in text
    assert "reading: 1 of 4 rows in 0 s" in text
