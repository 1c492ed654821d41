import io

import pytest
from rich.console import Console


class Clock:
    """Stands for the module ``time``, and moves when told."""

    def __init__(self):
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return round(1e9 * self.now)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in ("metrics", "progress_line"):
        monkeypatch.setattr(f"jaxpar.training.{module}.time", clock)
    return clock


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Console(file=io.StringIO(), force_terminal=True, width=120)
