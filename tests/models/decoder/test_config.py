"""Which configs are refused, and what does one that is accepted hold?"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.models import make_decoder
from jaxpar.models.decoder.config import DecoderConfig, num_params

# fields that do not fit, and what the error says
WRONG = [
    ({"width": 0}, r"width=0 must be at least 1"),
    ({"mlp_width": 0}, r"mlp_width=0 must be at least 1"),
    ({"num_layers": -1}, r"num_layers=-1 must be at least 1"),
    (
        {"width": 30},
        r"width=30 must be a multiple of num_heads=4 \(the nearest is 32\)",
    ),
    (
        {"width": 1},
        r"width=1 must be a multiple of num_heads=4 .* or head_width given",
    ),
    ({"num_kv_heads": 3}, r"num_heads=4 must be a multiple of num_kv_heads=3"),
    (
        {"positions": "rotary", "width": 20},
        r"heads have 5 \(head_width, or width=20 / num_heads=4\); make that even",
    ),
    ({"dropout": 1.0}, r"dropout=1.0 must be at least 0 and below 1"),
    ({"rotary_base": 1.0}, r"rotary_base=1\.0 must be above 1"),
    ({"local_rotary_base": 0.5}, r"local_rotary_base=0\.5 must be above 1"),
    ({"attention_softcap": 0.0}, r"attention_softcap=0\.0 must be above 0"),
    ({"norm_epsilon": -1.0}, r"norm_epsilon=-1\.0 must be above 0"),
    ({"window": 0}, r"window=0 must be at least 1"),
    (
        {"global_every": 2},
        r"global_every=2 is of blocks with a window, but window=None",
    ),
    ({"window": 4, "global_every": 1}, r"global_every=1 must be from 2 to num_layers"),
    ({"unroll": 0}, r"unroll=0 must be between 1 and num_layers=4"),
    ({"unroll": 5}, r"unroll=5 must be between 1 and num_layers=4"),
    (
        {"activation": "swigl"},
        r"activation='swigl' must be one of 'gelu', .* Did you mean 'swiglu'",
    ),
    ({"norm": "rms"}, r"norm='rms' must be one of .* Did you mean 'rmsnorm'"),
    ({"positions": "rope"}, r"positions='rope' must be one of 'learned', 'rotary'"),
    ({"attention": "flash"}, r"attention='flash' must be one of 'auto', 'xla', 'cudnn"),
    ({"remat": "ful"}, r"policy='ful' must be one of .* Did you mean 'full'"),
    ({"remat": "save-names"}, r"policy='save-names' with names=\(\)"),
    (
        {"remat": "save-names", "remat_names": ("mlp",)},
        r"remat_names='mlp' must be one of .* Did you mean 'mlp_hidden'",
    ),
]

SHAPES: list[dict[str, Any]] = [
    {},
    {"activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": False},
    {"activation": "swiglu", "num_kv_heads": 1, "tied_embedding": False},
    {"norm": "rmsnorm", "mlp_width": 40, "num_kv_heads": 2},
    {"bias": False, "tied_embedding": False, "positions": "rotary"},
    {"qkv_bias": True, "bias": False, "key_bias": True, "qk_norm": "heads"},
    {"head_width": 24, "num_kv_heads": 2, "post_norm": True, "activation": "geglu"},
    {"window": 4, "global_every": 3, "norm": "rmsnorm_plus_one"},
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_config_that_does_not_fit_raises(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**fields)


def test_config_resolves_none():
    assert DecoderConfig(num_heads=4).kv_heads == 4
    assert DecoderConfig(num_heads=4, num_kv_heads=2).kv_heads == 2
    assert DecoderConfig(width=128).hidden_width == 512
    assert DecoderConfig(width=128, mlp_width=100).hidden_width == 100
    assert DecoderConfig(width=128, activation="swiglu").hidden_width == 384
    assert DecoderConfig(width=4096, activation="swiglu").hidden_width == 10_944


@pytest.mark.parametrize("fields", SHAPES)
def test_num_params_equals_the_abstract_models(fields: dict[str, Any]):
    config = DecoderConfig(num_layers=3, width=32, vocab_size=50, seq_len=7, **fields)
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    params = jax.eval_shape(lambda: make_decoder(config).init(0, tokens).params)
    assert num_params(config) == sum(leaf.size for leaf in jax.tree.leaves(params))
