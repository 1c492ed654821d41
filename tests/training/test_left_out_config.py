"""Do a recipe's flags become the schedules of layers and tokens left out?"""

import pytest

from jaxpar.model.layer_drop import LayerDrop
from jaxpar.model.token_drop import RandomLTD
from jaxpar.models import DecoderConfig, make_decoder
from jaxpar.training.left_out_config import (
    LayerDropFlags,
    LeftOutConfig,
    TokenDropFlags,
)
from jaxpar.training.recovery import Recovery

MODEL = make_decoder(DecoderConfig())


@pytest.mark.parametrize(
    ("flags", "schedule_steps", "wanted"),
    [
        (LayerDropFlags(), None, None),
        (LayerDropFlags(theta=0.5), None, LayerDrop(0.5, 10 / 400)),
        (LayerDropFlags(theta=0.5), 100, LayerDrop(0.5, 10 / 100)),
        (LayerDropFlags(theta=0.5, gamma=1e-3), None, LayerDrop(0.5, 1e-3)),
    ],
)
def test_rate_of_the_schedule_is_that_of_the_run(flags, schedule_steps, wanted) -> None:
    own = LeftOutConfig(layer_drop=flags, schedule_steps=schedule_steps)
    assert own.leaving_out(MODEL, 400).layer_drop == wanted


def test_gamma_alone_is_refused() -> None:
    own = LeftOutConfig(layer_drop=LayerDropFlags(gamma=0.1))
    with pytest.raises(ValueError, match=r"gamma=0\.1 says how fast"):
        own.leaving_out(MODEL, 400)


def test_share_out_of_range_is_refused() -> None:
    own = LeftOutConfig(layer_drop=LayerDropFlags(theta=0.0))
    with pytest.raises(ValueError, match=r"theta=0\.0 must be above 0"):
        own.leaving_out(MODEL, 400)


def test_large_loss_of_few_layers_is_no_spike() -> None:
    rules = Recovery(nonfinite=7)
    assert LeftOutConfig().recovering(rules) == rules
    own = LeftOutConfig(layer_drop=LayerDropFlags(theta=0.5)).recovering(rules)
    assert own == Recovery(nonfinite=7, spike=0.0)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (TokenDropFlags(), None),
        (TokenDropFlags(start=64), RandomLTD(start=64, steps=266)),
        (
            TokenDropFlags(start=32, steps=9, multiple=32, first=0, positions=None),
            RandomLTD(0, start=32, steps=9, multiple=32, positions=None),
        ),
    ],
)
def test_tokens_grow_over_two_thirds_of_the_run(flags, wanted) -> None:
    own = LeftOutConfig(token_drop=flags)
    assert own.leaving_out(MODEL, 400).token_drop == wanted


def test_flags_of_tokens_without_a_start_are_refused() -> None:
    own = LeftOutConfig(token_drop=TokenDropFlags(steps=100))
    with pytest.raises(ValueError, match=r"start=None, so that all blocks see all"):
        own.leaving_out(MODEL, 400)
