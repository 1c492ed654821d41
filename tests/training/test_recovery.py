"""Which numbers of a step make a run roll back?"""

import math

import numpy as np
import pytest

from jaxpar.training.recovery import Recovery, StepMonitor

RULES = Recovery(window=8, spike=10.0, nonfinite=3)


def judged(monitor: StepMonitor, *losses: float, norm: float = 1.0) -> list[str | None]:
    return [monitor.judge(loss, norm) for loss in losses]


def test_score_is_the_robust_z_score_of_the_window():
    rng = np.random.default_rng(0)
    losses = rng.normal(3.0, 0.2, 20).tolist()
    monitor = StepMonitor(Recovery(window=8, spike=0.0), scales_loss=False)
    assert judged(monitor, *losses) == [None] * 20
    last = np.array(losses[-8:])
    deviation = np.median(np.abs(last - np.median(last)))
    expected = (4.0 - np.median(last)) / max(1.4826 * deviation, 0.03)
    assert monitor.score(4.0) == pytest.approx(expected)


def test_spike_is_found_after_half_a_window_and_is_not_taken_in():
    monitor = StepMonitor(RULES, scales_loss=False)
    assert judged(monitor, 2.0, 2.1, 1.9, 50.0) == [None] * 4, "too few to judge by"
    assert monitor.judge(60.0, 1.0) is not None
    monitor.begin_after([(2.0, 1.0)] * 8)
    why = monitor.judge(3.0, 1.0)
    assert why == ("loss 3 is 50 robust deviations above the median 2 of the last 8"), (
        "a loss that hardly changes has a deviation of one percent"
    )
    assert monitor.judge(2.1, 1.0) is None, "a spike does not move the median"
    assert monitor.judge(0.1, 1.0) is None, "a low loss is no spike"


def test_steps_without_finite_numbers_count_only_in_a_row():
    monitor = StepMonitor(RULES, scales_loss=False)
    nan, inf = math.nan, math.inf
    assert judged(monitor, nan, inf, 2.0, nan, nan) == [None] * 5
    assert monitor.judge(nan, 1.0) == "3 consecutive steps without finite numbers"
    monitor.begin_after([])
    assert judged(monitor, 2.0, 2.0, norm=inf) == [None] * 2
    assert monitor.judge(2.0, inf) is not None


def test_overflow_is_normal_where_the_loss_is_scaled():
    monitor = StepMonitor(RULES, scales_loss=True)
    assert judged(monitor, *[2.0] * 5, norm=math.inf) == [None] * 5
    assert not monitor.is_finite(math.nan, 1.0)


def test_start_takes_in_only_finite_steps():
    monitor = StepMonitor(RULES, scales_loss=False)
    monitor.begin_after([(2.0, 1.0)] * 3 + [(math.nan, 1.0)] * 9)
    assert monitor.score(2.0) is None, "three are too few"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spike", -1.0),
        ("window", 3),
        ("nonfinite", 0),
        ("rollbacks", -1),
        ("slow", 0.5),
    ],
)
def test_rule_out_of_its_range_is_refused(name, value):
    with pytest.raises(ValueError, match=f"recovery: {name}={value} must be at least"):
        Recovery(**{name: value})


def test_steps_in_which_a_pipeline_fills_are_not_bad():
    monitor = StepMonitor(RULES, scales_loss=False)
    assert judged(monitor, *[math.nan] * 5, norm=0.0) == [None] * 5
    assert judged(monitor, *[math.nan] * 3)[-1] is not None
