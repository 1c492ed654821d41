import jax
import jax.numpy as jnp
import pytest

from jaxpar.models.vit.config import num_params
from jaxpar.models.vit.model import make_vit
from jaxpar.models.vit.presets import VIT_PRESETS, vit_config

# The paper's table: millions of parameters, without a classifier's.
PAPER = [("vit-b16", 86), ("vit-l16", 307), ("vit-h14", 632)]


@pytest.mark.parametrize("name", VIT_PRESETS)
def test_preset_counts_as_its_abstract_model(name: str):
    config = vit_config(name)
    image = jax.ShapeDtypeStruct((1, *config.image_shape), jnp.float32)
    params = jax.eval_shape(lambda: make_vit(config).init(0, image).params)
    assert num_params(config) == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(("name", "millions"), PAPER)
def test_preset_has_the_papers_size(name: str, millions: float):
    count = num_params(vit_config(name)) / 1e6
    assert count == pytest.approx(millions, rel=0.012)


def test_vit_config_replaces_fields():
    config = vit_config("vit-tiny", dropout=0.1)
    assert (config.dropout, config.width) == (0.1, VIT_PRESETS["vit-tiny"].width)


def test_unknown_preset_names_the_near_one():
    with pytest.raises(
        ValueError, match=r"name='vit-b15' must be one of .*Did you mean 'vit-b16'\?"
    ):
        vit_config("vit-b15")


def test_unknown_field_names_the_near_one():
    with pytest.raises(
        ValueError, match=r"num_layer=2 is not a field .*Did you mean 'num_layers'\?"
    ):
        vit_config("vit-tiny", num_layer=2)
