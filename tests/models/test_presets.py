import jax
import jax.numpy as jnp
import pytest

from jaxpar.models import make_decoder
from jaxpar.models.decoder.config import num_params
from jaxpar.models.decoder.presets import PRESETS, decoder_config

# Megatron-LM's table: parameters in 1e9, hidden size, layers
MEGATRON = [
    ("1.7b", 1.7, 2304, 24),
    ("3.6b", 3.6, 3072, 30),
    ("7.5b", 7.5, 4096, 36),
    ("18.4b", 18.4, 6144, 40),
    ("39.1b", 39.1, 8192, 48),
    ("76.1b", 76.1, 10_240, 60),
    ("145.6b", 145.6, 12_288, 80),
    ("310.1b", 310.1, 16_384, 96),
    ("529.6b", 529.6, 20_480, 105),
    ("1008b", 1008.0, 25_600, 128),
]
PUBLISHED = [("124m", 124.4e6), ("350m", 355e6), ("1.3b", 1.3e9), ("7b", 6.738e9)]
PUBLISHED += [("8b", 8.030e9), ("70b", 68.98e9), ("mixtral-8x7b", 46.7e9)]


@pytest.mark.parametrize("name", PRESETS)
def test_preset_counts_as_its_abstract_model(name: str):
    config = decoder_config(name)
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    params = jax.eval_shape(lambda: make_decoder(config).init(0, tokens).params)
    assert num_params(config) == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(("name", "billions", "width", "num_layers"), MEGATRON)
def test_preset_matches_megatrons_table(
    name: str, billions: float, width: int, num_layers: int
):
    config = decoder_config(name)
    assert (config.width, config.num_layers) == (width, num_layers)
    assert (config.vocab_size, config.seq_len) == (51_200, 2048)
    tolerance = 0.01 * billions if name == "1008b" else 0.1
    assert num_params(config) / 1e9 == pytest.approx(billions, abs=tolerance)


@pytest.mark.parametrize(("name", "count"), PUBLISHED)
def test_preset_has_the_published_size(name: str, count: float):
    assert num_params(decoder_config(name)) == pytest.approx(count, rel=0.02)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_splits_over_eight_tensor_shards(name: str):
    config = decoder_config(name)
    if config.num_heads % 8 == 0:
        assert config.vocab_size % 8 == 0
        assert config.hidden_width % 8 == 0
        assert config.kv_heads % 8 == 0


def test_decoder_config_replaces_fields():
    config = decoder_config("tiny", num_layers=2, dropout=0.1)
    assert (config.num_layers, config.dropout) == (2, 0.1)
    assert config.width == decoder_config("tiny").width


def test_decoder_config_unknown_preset_names_the_near_one():
    with pytest.raises(
        ValueError, match=r"name='125m' must be one of 'tiny', .*Did you mean '124m'\?"
    ):
        decoder_config("125m")


def test_decoder_config_unknown_field_names_the_near_one():
    with pytest.raises(
        ValueError, match=r"num_layer=2 is not a field .*Did you mean 'num_layers'\?"
    ):
        decoder_config("tiny", num_layer=2)
