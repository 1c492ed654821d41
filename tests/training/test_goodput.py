"""Does the account of a run's time add up, with what restarts and rollbacks cost?"""

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxpar.training import goodput


def account(
    times: tuple[float, float], steps: tuple[int, int], **seconds: float
) -> dict[str, Any]:
    return {
        "began": times[0],
        "ended": times[1],
        "resumed": steps[0],
        "step": steps[1],
        "seconds": seconds,
        "marks": [],
    }


def test_steps_done_again_are_lost_and_the_pause_is_down() -> None:
    """Killed at step 10, back at step 6 after two seconds: four steps of ten."""
    first = account((0.0, 25.0), (0, 10), start=5.0, step=20.0)
    second = account((27.0, 40.0), (6, 14), start=5.0, step=8.0)
    sums = goodput.total([first, second])
    assert sums == {"start": 10.0, "step": 20.0, "lost": 8.0, "down": 2.0}
    assert sum(sums.values()) == 40.0


def test_marks_tell_what_was_done_by_a_step() -> None:
    uneven: dict[str, Any] = account((0.0, 20.0), (0, 10), step=20.0) | {
        "marks": [[6, 4.0]]
    }
    assert goodput.seconds_at(uneven, 6) == 4.0
    assert goodput.seconds_at(uneven, 8) == 12.0
    assert goodput.seconds_at(uneven, 3) == 2.0
    assert goodput.seconds_at(uneven, 10) == 20.0


def test_start_that_never_came_to_a_step_loses_nothing() -> None:
    cut = account((0.0, 3.0), (0, 0), start=3.0) | {
        "resumed": None,
        "step": None,
    }
    sums = goodput.total([cut, account((4.0, 9.0), (0, 2), start=3.0, step=2.0)])
    assert sums == {"start": 6.0, "down": 1.0, "step": 2.0, "lost": 0.0}


def test_second_clock_of_a_process_goes_on_where_the_first_ended(
    tmp_path: Path,
) -> None:
    first = goodput.Clock(tmp_path)
    first.write()
    goodput.Clock(tmp_path).write()
    earlier, later = goodput.read_account(tmp_path)
    assert later["began"] == earlier["ended"]
    sums = goodput.total([earlier, later])
    assert sum(sums.values()) == pytest.approx(
        later["ended"] - earlier["began"], abs=0.01
    )


def test_clock_accounts_for_all_of_the_time(tmp_path: Path) -> None:
    """A rollback takes what was done since the save from the steps."""
    clock = goodput.Clock(tmp_path)
    clock.resume(0)
    for step in (1, 2, 3):
        clock.enter("step", step)
        time.sleep(0.02)
        with clock.during("data"):
            time.sleep(0.01)
        if step == 2:
            clock.saved(2)
    clock.resume(2)
    clock.write()
    (found,) = goodput.read_account(tmp_path)
    seconds = found["seconds"]
    assert sum(seconds.values()) == pytest.approx(found["ended"] - found["began"], 0.01)
    assert 0.02 <= seconds["lost"] < 0.04 <= seconds["step"]
    assert seconds["data"] >= 0.03
    assert (found["resumed"], found["step"]) == (0, 2)


def test_table_tells_the_share_of_the_steps(tmp_path: Path) -> None:
    clock = goodput.Clock(tmp_path)
    clock.resume(0)
    clock.enter("step", 1)
    time.sleep(0.02)
    clock.write()
    console = Console(file=io.StringIO(), width=80)
    goodput.show(tmp_path, console)
    text = console.file.getvalue()
    assert "goodput" in text
    assert "1 start" in text
    assert "useful steps" in text
    goodput.show(tmp_path / "none", console)
