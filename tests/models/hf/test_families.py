"""Are a published config's gaps named?"""

import dataclasses

import pytest

from jaxpar.models.hf.families import Family, require


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    depth: int = 2


FAMILY = Family(
    read_fields=lambda hf: {"width": hf["hidden_size"]},
    config=Config,
    make_model=lambda config: None,
    loss_fn=lambda config: lambda model, batch: None,
    leaves=lambda config, hf, names: {},
    num_params=lambda config: config.width,
)


def test_overrides_replace_fields() -> None:
    hf = {"model_type": "some", "hidden_size": 3}
    assert FAMILY.read_config(hf) == Config(3)
    assert FAMILY.read_config(hf, width=5, depth=1) == Config(5, 1)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match="some: the published config has no field 'hi"):
        FAMILY.read_config({"model_type": "some"})


def test_values_that_are_not_known_are_named() -> None:
    require({"model_type": "some"}, "hidden_act", "silu")
    require({"model_type": "some", "hidden_act": "silu"}, "hidden_act", "silu")
    with pytest.raises(ValueError, match="some: hidden_act='x' is not known here; 's"):
        require({"model_type": "some", "hidden_act": "x"}, "hidden_act", "silu", "relu")
