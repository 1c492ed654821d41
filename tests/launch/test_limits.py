"""Which workers take too long at one thing?"""

import pytest

from jaxpar.launch.heartbeat import Beat
from jaxpar.launch.limits import Limits

LIMITS = Limits(start=10.0, compile=40.0, step=5.0, save=20.0)


@pytest.mark.parametrize(
    ("phase", "seconds"),
    [
        ("start", 10),
        ("compile", 40),
        ("evaluate", 40),
        ("replay", 40),
        ("step", 5),
        ("data", 5),
        ("save", 20),
        ("restore", 20),
        ("end", 20),
    ],
)
def test_each_phase_has_its_limit(phase, seconds):
    assert LIMITS.of(phase) == seconds


def test_late_workers_come_with_the_least_progress_first():
    beats = [
        Beat("step", 8, None, 0.0),
        Beat("step", 7, None, 2.0),
        Beat("start", None, None, 1.0),
        Beat("step", 9, None, 8.0),
        Beat("compile", 7, None, 0.0),
    ]
    late = LIMITS.late(beats, now=12.0)
    assert [place for place, _ in late] == [2, 1, 0]
    assert late[1][1].endswith("for 10.0 s, above the limit of 5 s")
    assert "step 7" in late[1][1]


def test_zero_is_no_limit():
    assert Limits(step=0.0).late([Beat("step", 1, None, 0.0)], now=1e9) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step": -1.0}, "limits: step=-1 must be seconds, at least 0"),
        ({"lost": 0.0}, "limits: lost=0 must be seconds, above 0"),
        ({"rendezvous": 0.0}, "limits: rendezvous=0 must be seconds, above 0"),
    ],
)
def test_numbers_that_are_no_limits_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Limits(**given)
