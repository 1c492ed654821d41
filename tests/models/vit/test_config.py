"""Which configs are refused, and what does one that is accepted hold?"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.models.vit.config import VitConfig, num_params
from jaxpar.models.vit.model import make_vit

# fields that do not fit, and what the error says
WRONG = [
    ({"width": 0}, r"width=0 must be at least 1"),
    ({"channels": 0}, r"channels=0 must be at least 1"),
    ({"mlp_width": 0}, r"mlp_width=0 must be at least 1"),
    ({"num_labels": 1}, r"num_labels=1 must be at least 2, the classes"),
    (
        {"image_size": 230},
        r"image_size=230 must be a multiple of patch_size=16.* nearest is 224",
    ),
    (
        {"image_size": 4},
        r"image_size=4 must be a multiple of patch_size=16.* nearest is 16",
    ),
    ({"patch_stride": 17}, r"patch_stride=17 must be at most patch_size=16"),
    (
        {"patch_stride": 12, "image_size": 225},
        r"and a multiple of patch_stride=12, .* nearest is 220",
    ),
    ({"width": 100}, r"width=100 must be a multiple of num_heads=12 .* is 96\)"),
    ({"dropout": 1.0}, r"dropout=1.0 must be at least 0 and below 1"),
    ({"norm_epsilon": 0.0}, r"norm_epsilon=0\.0 must be above 0"),
    ({"unroll": 13}, r"unroll=13 must be between 1 and num_layers=12"),
    (
        {"activation": "gelu_exac"},
        r"activation='gelu_exac' must be one of .* Did you mean 'gelu_exact'",
    ),
    ({"pooling": "max"}, r"pooling='max' must be one of 'class_token', 'mean'"),
    ({"attention": "flash"}, r"attention='flash' must be one of 'auto', 'xla', 'cudnn"),
    ({"remat": "ful"}, r"policy='ful' must be one of .* Did you mean 'full'"),
    (
        {"remat": "save-names", "remat_names": ("mlp",)},
        r"remat_names='mlp' must be one of .* Did you mean 'mlp_hidden'",
    ),
]
SHAPES: list[dict[str, Any]] = [
    {},
    {"key_bias": True, "mlp_width": 20},
    {"qkv_bias": False, "pooling": "mean"},
    {"activation": "swiglu", "channels": 1, "patch_size": 2},
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_config_that_does_not_fit_raises(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        VitConfig(**fields)


def test_config_resolves_none_and_counts_tokens():
    assert VitConfig().hidden_width == 3072
    assert VitConfig(mlp_width=100).hidden_width == 100
    assert VitConfig().head_size == 64
    assert VitConfig().num_tokens == 197
    assert VitConfig(pooling="mean").num_tokens == 196
    assert VitConfig(image_size=32, channels=1).image_shape == (32, 32, 1)


@pytest.mark.parametrize("fields", SHAPES)
def test_num_params_equals_the_abstract_models(fields: dict[str, Any]):
    shape = {"image_size": 8, "patch_size": 4, "num_layers": 3, "num_labels": 7}
    config = VitConfig(**{**shape, "width": 32, "num_heads": 4, **fields})
    image = jax.ShapeDtypeStruct((1, *config.image_shape), jnp.float32)
    params = jax.eval_shape(lambda: make_vit(config).init(0, image).params)
    assert num_params(config) == sum(leaf.size for leaf in jax.tree.leaves(params))
