import io
import re

import pytest
from rich.console import Console

from jaxpar.training.metrics import MetricsLogger

FULL = {"loss": 2.34567, "grad_norm": 0.87654, "learning_rate": 3e-4, "other": 7.0}


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_live_line_says_how_the_run_goes(tmp_path, terminal, clock):
    with MetricsLogger(
        tmp_path, total_steps=100, tokens_per_step=5000, console=terminal
    ) as logger:
        for step in (1, 2, 3):
            logger.log(step, FULL)
            clock.now += 0.5
        logger.flush()
        assert logger.tokens_per_second == 10_000
    last = shown(terminal).split("\r")[-1]
    assert (
        "step 3/100  loss 2.346  grad norm 0.877  lr 3.00e-04  "
        "10k tokens/s  0:00:49 left " in last
    )
    assert shown(terminal).count("\n") == 1


def test_live_line_is_redrawn_ten_times_a_second_at_most(tmp_path, terminal, clock):
    with MetricsLogger(tmp_path, console=terminal) as logger:
        for step in range(1, 101):
            logger.log(step, {"loss": 1.0})
            clock.now += 0.01
    text = shown(terminal)
    assert 10 <= text.count("step ") <= 13
    assert "step 100" in text


def test_line_leaves_out_what_is_not_known(tmp_path, clock):
    console = Console(file=io.StringIO())
    with MetricsLogger(tmp_path, console=console) as logger:
        logger.log(1, {"accuracy": 1.0})
    assert shown(console) == "step 1\n"


def test_line_keeps_what_only_some_steps_log(tmp_path, clock):
    console = Console(file=io.StringIO())
    with MetricsLogger(tmp_path, console=console) as logger:
        logger.log(1, {"loss": 1.0, "learning_rate": 2e-3})
        logger.log(2, {"loss": 2.0})
        clock.now += 5
    lines = shown(console).splitlines()
    assert lines == [f"step {i}  loss {i}  lr 2.00e-03" for i in (1, 2)]


def test_plain_lines_come_at_tenths_and_every_five_seconds(tmp_path, clock):
    console = Console(file=io.StringIO(), width=20)
    with MetricsLogger(tmp_path, total_steps=50, console=console) as logger:
        for step in range(1, 50):
            logger.log(step, {"loss": 1.0})
            clock.now += 5 if step == 12 else 0.01
    lines = shown(console).splitlines()
    printed = [int(re.findall(r"step (\d+)/50  loss 1", line)[0]) for line in lines]
    assert printed == [1, 5, 10, 12, 15, 20, 25, 30, 35, 40, 45, 49]


@pytest.mark.parametrize(
    ("seconds_per_step", "left"),
    [(0.001, "0:00:01"), (2.0, "0:32:38"), (60.0, "16:19:00")],
)
def test_time_left_follows_the_rate(tmp_path, clock, seconds_per_step, left):
    console = Console(file=io.StringIO())
    with MetricsLogger(tmp_path, total_steps=1000, console=console) as logger:
        for step in range(1, 22):
            logger.log(step, {})
            logger.flush()
            clock.now += seconds_per_step
    assert shown(console).splitlines()[-1] == f"step 21/1000  {left} left"


def test_rate_is_of_the_last_ten_minutes(tmp_path, clock):
    with MetricsLogger(tmp_path, tokens_per_step=600, console=False) as logger:
        logger.log(1, {})
        logger.flush()
        assert logger.tokens_per_second is None
        for step, seconds in enumerate(5 * [600.0] + 30 * [60.0], start=2):
            clock.now += seconds
            logger.log(step, {})
            logger.flush()
        assert logger.tokens_per_second == 10.0


def test_rate_starts_anew_when_steps_go_back(tmp_path, clock):
    with MetricsLogger(tmp_path, tokens_per_step=10, console=False) as logger:
        for step in (8, 9, 3, 4):
            logger.log(step, {})
            logger.flush()
            clock.now += 2.0
        assert logger.tokens_per_second == 5.0


@pytest.mark.parametrize(
    ("rate", "text"), [(7.5, "7.5"), (1234.0, "1.23k"), (5.6e7, "56M"), (2e9, "2G")]
)
def test_rate_is_shortened(tmp_path, clock, rate, text):
    console = Console(file=io.StringIO())
    tokens = round(rate * 2)
    with MetricsLogger(tmp_path, tokens_per_step=tokens, console=console) as logger:
        for step in (1, 2):
            logger.log(step, {})
            logger.flush()
            clock.now += 2.0
    assert shown(console).splitlines()[-1] == f"step 2  {text} tokens/s"
