"""Do a recipe's flags become the schedule by which its layers are left out?"""

import pytest

from jaxpar.model.layer_drop import LayerDrop
from jaxpar.models import DecoderConfig, make_decoder
from jaxpar.training.layer_drop_config import LayerDropConfig, LayerDropFlags
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
    own = LayerDropConfig(layer_drop=flags, schedule_steps=schedule_steps)
    assert own.leaving_out(MODEL, 400).layer_drop == wanted


def test_gamma_alone_is_refused() -> None:
    own = LayerDropConfig(layer_drop=LayerDropFlags(gamma=0.1))
    with pytest.raises(ValueError, match=r"gamma=0\.1 says how fast"):
        own.leaving_out(MODEL, 400)


def test_share_out_of_range_is_refused() -> None:
    own = LayerDropConfig(layer_drop=LayerDropFlags(theta=0.0))
    with pytest.raises(ValueError, match=r"theta=0\.0 must be above 0"):
        own.leaving_out(MODEL, 400)


def test_large_loss_of_few_layers_is_no_spike() -> None:
    rules = Recovery(nonfinite=7)
    assert LayerDropConfig().recovering(rules) == rules
    own = LayerDropConfig(layer_drop=LayerDropFlags(theta=0.5)).recovering(rules)
    assert own == Recovery(nonfinite=7, spike=0.0)
