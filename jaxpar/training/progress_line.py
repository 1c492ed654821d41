"""How does a run show how far it is: one line, its numbers, and the time left."""

import datetime
import math
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_RATE_WINDOW_S = 600.0
_REDRAW_S = 0.1
_PLAIN_LINE_S = 5.0


class ProgressLine:
    """How far a run is: a bar that is redrawn, or plain lines at intervals.

    Args:
      console: where it is shown; None for nowhere.
      total_steps: the last step; None if unknown.
      tokens_per_step: of a global batch; None if unknown.
    """

    def __init__(
        self,
        console: Console | None,
        total_steps: int | None,
        tokens_per_step: int | None,
    ):
        self._console, self._tokens_per_step = console, tokens_per_step
        self._draws_bar = console is not None and console.is_interactive
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            *([BarColumn(20)] if total_steps else []),
            console=console,
            auto_refresh=False,
            speed_estimate_period=_RATE_WINDOW_S,
            get_time=lambda: time.monotonic(),
            disable=not self._draws_bar,
        )
        self._bar.add_task("", total=total_steps)
        (self._task,) = self._bar.tasks
        self._values: dict[str, float] = {}
        self._is_shown, self._shown_at, self._shown_tenths = True, -math.inf, 0

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last 10 minutes; None before the second step."""
        if self._task.speed is None or self._tokens_per_step is None:
            return None
        return self._task.speed * self._tokens_per_step

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Take a step's numbers; show them if it is time."""
        self._values.update((k.removeprefix("train/"), v) for k, v in values.items())
        if step < self._task.completed:
            self._bar.reset(self._task.id)
        self._bar.update(self._task.id, completed=step)
        self._is_shown = False
        since = time.monotonic() - self._shown_at
        tenths = int(self._task.percentage // 10) if self._task.total else 0
        if self._draws_bar:
            is_due = since >= _REDRAW_S
        else:
            is_due = since >= _PLAIN_LINE_S or tenths > self._shown_tenths
        if is_due:
            self._shown_tenths = tenths
            self._show()

    def close(self) -> None:
        """Show the last step's numbers, and end the line."""
        if not self._is_shown:
            self._show()
        if self._draws_bar:
            self._bar.stop()

    def _show(self) -> None:
        if self._draws_bar:
            self._bar.start()
            self._bar.update(self._task.id, description=str(self), refresh=True)
        elif self._console is not None:
            self._console.print(str(self), soft_wrap=True, markup=False)
        self._is_shown, self._shown_at = True, time.monotonic()

    def __str__(self) -> str:
        total = "" if self._task.total is None else f"/{self._task.total:.0f}"
        parts = [f"step {self._task.completed:.0f}{total}"]
        for name, form in (
            ("loss", "loss {:.4g}"),
            ("grad_norm", "grad norm {:.3g}"),
            ("learning_rate", "lr {:.2e}"),
        ):
            if name in self._values:
                parts.append(form.format(self._values[name]))
        if self.tokens_per_second is not None:
            parts.append(f"{_shorten(self.tokens_per_second)} tokens/s")
        if self._task.speed is not None and self._task.time_remaining is not None:
            left = datetime.timedelta(seconds=round(self._task.time_remaining))
            parts.append(f"{left} left")
        return "  ".join(parts)


def _shorten(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
