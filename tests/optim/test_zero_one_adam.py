"""Does 0/1 Adam take the numbers that it needs, and refuse others?"""

import dataclasses

import pytest

from jaxpar.optim import OPTIMIZERS, zero_one_adam


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"var_freeze_step": 0}, "var_freeze_step=0 must be at least 1"),
        ({"local_step_scaler": 0}, "local_step_scaler=0 must be at least 1"),
        ({"local_step_clipper": 12}, "local_step_clipper=12 must be a power of two"),
        ({"b2": 1.0}, r"b2=1.0 must be from 0 to below 1"),
    ],
)
def test_numbers_out_of_range_are_refused(given, said) -> None:
    with pytest.raises(ValueError, match=said):
        zero_one_adam(1e-3, **{"var_freeze_step": 10, **given})


def test_a_recipe_s_settings_are_its_numbers() -> None:
    settings = dataclasses.replace(
        OPTIMIZERS["zero_one_adam"], var_freeze_step=20, local_step_clipper=8
    )
    made = settings.make(1e-3)
    assert made.rounds.var_freeze_step == 20
    assert made.rounds.local_step_clipper == 8
    assert made.weight_decay == settings.weight_decay
