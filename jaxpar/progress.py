"""What takes long says so, on standard error: planning, hashing, tokenizing, compiling.

A terminal gets a bar, or a line that counts seconds; anything else plain lines, few of
them. What ends within two seconds is not mentioned.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

QUIET_SECONDS = 2.0
"""What ends sooner prints nothing."""

LINE_SECONDS = 15.0
"""Between two lines where there is no terminal."""


@contextlib.contextmanager
def counting(
    what: str, total: int | None, *, unit: str = "", shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show how far a loop is.

    Args:
      what: what it does, such as "tokenizing corpus.jsonl".
      total: of what is counted; None if unknown.
      unit: "B" for bytes; otherwise a plural, such as "files", or nothing.
      shown: False to print nothing, as on processes other than the first.

    Yields:
      A function to call with how many more are done; any thread may call it.

    Example:
      >>> with counting("hashing", 3) as advance:
      ...     for _ in range(3):
      ...         advance(1)
    """
    bar, is_done = _Bar(what, total, unit) if shown else None, False
    try:
        yield bar.advance if bar else lambda _: None
        is_done = True
    finally:
        if bar:
            bar.close(is_done=is_done)


@contextlib.contextmanager
def waiting(what: str, *, expected: str = "", shown: bool = True) -> Iterator[None]:
    """Say what is being waited for, where nothing can be counted.

    Args:
      what: such as "compiling the step".
      expected: how long it may take, such as "about 40 s"; empty if unknown.
      shown: False to print nothing.

    Example:
      >>> with waiting("compiling the step", expected="about 40 s"):
      ...     pass
    """
    if not shown:
        yield
        return
    ended, began = threading.Event(), time.monotonic()
    text = f"{what}, {expected}" if expected else what
    speaker = threading.Thread(target=_speak, args=(text, ended), daemon=True)
    speaker.start()
    is_done = False
    try:
        yield
        is_done = True
    finally:
        ended.set()
        speaker.join()
        seconds = time.monotonic() - began
        if is_done and seconds >= QUIET_SECONDS:
            _console().print(f"{what}: {seconds:.0f} s", markup=False)


def announce(line: str) -> None:
    """Print a line of what was decided, to standard error."""
    _console().print(line, markup=False)


def _console() -> Console:
    # Made anew: tests and notebooks replace sys.stderr.
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def _speak(text: str, ended: threading.Event) -> None:
    """Say a text until the event: a live line in a terminal, or a line at intervals."""
    if ended.wait(QUIET_SECONDS):
        return
    console = _console()
    if not console.is_terminal:
        began = time.monotonic() - QUIET_SECONDS
        console.print(text, markup=False)
        while not ended.wait(LINE_SECONDS):
            console.print(f"{text} ({time.monotonic() - began:.0f} s)", markup=False)
        return
    with console.status(Text(text)):
        ended.wait()


class _Bar:
    """Counts, and shows the count once it takes long."""

    def __init__(self, what: str, total: int | None, unit: str):
        self._console, self._lock = _console(), threading.Lock()
        self._began = self._said = time.monotonic()
        self._what, self._total, self._unit, self._done = what, total, unit, 0
        number = DownloadColumn() if unit == "B" else MofNCompleteColumn()
        ends: list[ProgressColumn] = [TimeElapsedColumn(), TimeRemainingColumn()]
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            number,
            *ends,
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(what, total=total)
        self._is_live = False

    def advance(self, more: int) -> None:
        with self._lock:
            self._done += more
            self._bar.update(self._task, completed=self._done)
            now = time.monotonic()
            if now - self._began < QUIET_SECONDS:
                return
            if self._console.is_terminal and not self._is_live:
                self._bar.start()
                self._is_live = True
            elif not self._console.is_terminal and self._is_due(now):
                self._said = now
                self._print(f"{self._what}: {self._count()}")

    def _is_due(self, now: float) -> bool:
        return self._said == self._began or now - self._said >= LINE_SECONDS

    def close(self, *, is_done: bool) -> None:
        with self._lock:
            if self._is_live:
                self._bar.stop()
            seconds = time.monotonic() - self._began
            if is_done and seconds >= QUIET_SECONDS:
                self._print(f"{self._what}: {self._count()} in {seconds:.0f} s")

    def _count(self) -> str:
        if self._unit == "B":
            done, total = self._done / 1e6, (self._total or 0) / 1e6
            of = f" of {total:,.1f}" if self._total else ""
            return f"{done:,.1f}{of} MB"
        of = f" of {self._total:,}" if self._total else ""
        return f"{self._done:,}{of} {self._unit}".rstrip()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False)
