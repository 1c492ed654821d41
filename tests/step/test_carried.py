"""Are the parts that a user adds to the state checked, by name?"""

import pytest

from jaxpar.optim.ema import Ema
from jaxpar.step.carried import check_carried


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([0.999], TypeError, r"carried: 0.999 must have a name, init\(params\) and"),
        ([Ema(0.9), Ema(0.99)], ValueError, r"'ema' is the name of two parts"),
        ([Ema(0.9, "loss_scale")], ValueError, r"'loss_scale' is the name of two"),
        ([Ema(0.9, "a/b")], ValueError, r"Ema is named 'a/b'; the name is a key of"),
        ([Ema(0.9, "")], ValueError, r"Ema is named ''; the name is a key of"),
    ],
    ids=str,
)
def test_parts_that_can_not_be_carried_are_refused(parts, error, message):
    with pytest.raises(error, match=message):
        check_carried(parts)


def test_parts_of_different_names_are_taken():
    check_carried([Ema(0.9), Ema(0.99, "slow")])
