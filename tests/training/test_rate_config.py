"""Do a recipe's flags become the schedules that they name?"""

import dataclasses

import numpy as np
import optax
import pytest

from jaxpar.optim import warmup_then
from jaxpar.training.rate_config import RateConfig
from jaxpar.training.recovery import Recovery

STEPS = np.arange(130)


@pytest.mark.parametrize("steps", [1, 8, 100])
def test_default_is_the_cosine_of_optax_to_the_bit(steps: int) -> None:
    own = RateConfig().make_schedule(5e-3, steps)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 5e-3, steps // 10, steps)
    np.testing.assert_array_equal(own(STEPS), theirs(STEPS))


@pytest.mark.parametrize("decay", ["linear", "inverse_sqrt", "wsd"])
def test_warm_up_is_a_tenth_of_the_schedule(decay) -> None:
    own = RateConfig(decay=decay, schedule_steps=90).make_schedule(0.1, 200)
    right = warmup_then(decay, 0.1, steps=90, warmup_steps=9)
    np.testing.assert_array_equal(own(STEPS), right(STEPS))


def test_range_test_goes_from_a_tenth_to_ten_times_the_rate() -> None:
    own = RateConfig(decay="range").make_schedule(0.3, 100)
    right = np.linspace(0.03, 3.0, 101)
    np.testing.assert_allclose(own(STEPS[:101]), right, rtol=1e-6)
    with pytest.raises(ValueError, match="steps=9: a range test needs 10 at least"):
        RateConfig(decay="range", schedule_steps=9).make_schedule(0.3, 100)


def test_nothing_rolls_back_in_a_range_test_only() -> None:
    rules = Recovery(window=32)
    assert RateConfig().recovering(rules) is rules
    found = RateConfig(decay="range").recovering(rules)
    given = {"spike": 0.0, "nonfinite": found.nonfinite}
    assert found == dataclasses.replace(rules, **given)
    assert found.nonfinite > 1e9
