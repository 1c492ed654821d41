"""Are numbers of ZeRO++ that can't be refused?"""

import pytest

from jaxpar.optim import ZeroPlusPlus
from jaxpar.sharding.zero import zero_stage


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stage": 0}, "stage=0 of ZeroPlusPlus must be 1, 2 or 3"),
        ({"weight_bits": 1}, "weight_bits=1 must be 8, 4 or None"),
        (
            {"gradient_bits": None, "inside_bits": 8},
            "inside_bits=8 needs gradient_bits",
        ),
        ({"gradient_bits": 16}, "gradient_bits=16 must be 8, 4 or None"),
        ({"block": 9}, "block=9 must be even"),
        ({"error_decay": 1.0}, "error_decay=1.0 must be from 0 to below 1"),
        ({"reset_every": 0}, "reset_every=0 must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(given, said) -> None:
    with pytest.raises(ValueError, match=said):
        ZeroPlusPlus(**given)


def test_it_is_a_row_of_the_table() -> None:
    row = zero_stage(ZeroPlusPlus(2, gradient_bits=None, secondary=True))
    assert (row.number, row.gather, row.over_replicas) == (2, "step", True)
    assert row.weights is not None
    assert row.weights.bits == 8
    assert row.gradients is None
    assert row.by_layer.over_replicas
    assert not zero_stage(2).over_replicas
