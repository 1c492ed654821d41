"""Do the steps stay that a rule names, and no others?"""

import pytest

from jaxpar.checkpoint import Keep

STEPS = {10: 3.0, 20: 1.0, 25: 2.0, 30: None, 40: 1.0, 50: 5.0}


@pytest.mark.parametrize(
    ("keep", "going"),
    [
        (Keep(), [10, 20, 25]),
        (Keep(last=None), []),
        (Keep(last=1), [10, 20, 25, 30, 40]),
        (Keep(last=1, every=20), [10, 25, 30]),
        (Keep(last=1, best=1), [10, 20, 25, 30]),
        (Keep(last=1, best=2), [10, 25, 30]),
        (Keep(last=1, best=9), [30]),
        (Keep(last=9), []),
    ],
)
def test_a_step_stays_if_any_rule_names_it(keep, going):
    assert keep.going(STEPS) == going


def test_the_newest_step_always_stays():
    for last in (1, 2, 3):
        assert 50 not in Keep(last=last).going(STEPS)
    assert Keep(last=1).going({}) == []


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"last": 0}, "last=0 must be at least 1, or None for all"),
        ({"every": 0}, "every=0 must be at least 1, or None for none"),
        ({"best": -1}, "best=-1 must be at least 0"),
    ],
)
def test_numbers_that_keep_nothing_are_refused(wrong, text):
    with pytest.raises(ValueError, match=text):
        Keep(**wrong)
