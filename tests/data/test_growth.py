"""Does a number grow as its formula says, and are impossible ones refused?"""

import math

import pytest

from jaxpar.data.growth import Growth, GrowthInSteps, value_at


@pytest.mark.parametrize("root", [1.0, 2.0, 3.5])
@pytest.mark.parametrize(("start", "end", "multiple"), [(8, 128, 8), (5, 40, 5)])
def test_growth_is_the_formula_of_the_papers(
    start: int, end: int, multiple: int, root: float
) -> None:
    growth = Growth(start, end, steps=77, root=root, multiple=multiple)
    for step in range(200):
        part = (min(step, 77) / 77) ** (1 / root)
        right = math.floor(part * (end - start) + start)
        assert value_at(growth, step) == min(right - right % multiple, end), step
    assert {value_at(growth, step) for step in range(200)} <= set(growth.values)


def test_number_that_does_not_grow_has_one_value() -> None:
    growth = Growth(64, 64, steps=10)
    assert (growth.values, growth.starts) == ((64,), (0,))
    assert GrowthInSteps((64,), ()).starts == (0,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 0}, "Growth: steps=0 must be at least 1"),
        ({"multiple": 0}, "Growth: multiple=0 must be at least 1"),
        ({"root": 0.0}, "Growth: root=0.0 must be above 0; 1 is linear"),
        ({"start": 60}, "start=60 must be a positive multiple of multiple=64"),
        ({"start": 0}, "start=0 must be a positive multiple"),
        ({"end": 100}, "end=100 must be a positive multiple of multiple=64"),
        ({"start": 256, "end": 128}, "start=256 must be at most end=128"),
    ],
)
def test_growth_out_of_range_is_refused(change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Growth(**{"start": 64, "end": 256, "steps": 10, **change})


@pytest.mark.parametrize(
    ("values", "until", "said"),
    [
        ((64, 128), (), "until=.* must have a step for each of values="),
        ((128, 64), (5,), "values=.* must be positive and ascend"),
        ((0, 64), (5,), "values=.* must be positive and ascend"),
        ((1, 2, 3), (5, 5), "until=.* must be positive and ascend"),
        ((1, 2), (0,), "until=.* must be positive and ascend"),
    ],
)
def test_values_by_hand_that_do_not_fit_are_refused(
    values: tuple, until: tuple, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        GrowthInSteps(values, until)
