"""Is a CoAtNet read as it is written, and what is refused?

`tests/models/hf/test_against_coatnet.py` compares with timm.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxpar.models.coatnet.model import make_coatnet
from jaxpar.models.coatnet.presets import coatnet_config
from jaxpar.models.coatnet.timm import read_timm, write_timm
from jaxpar.tree import named_leaves
from jaxpar.types import Params, PyTree

CONFIG = coatnet_config(
    "coatnet-tiny",
    image_size=16,
    widths=(4, 4, 32, 32),
    stem_width=4,
    norm="batch",
    key_bias=True,
)


@functools.cache
def drawn() -> tuple[Params, PyTree]:
    """Parameters and statistics at random."""
    shape = (1, CONFIG.image_size, CONFIG.image_size, 3)
    image = jax.ShapeDtypeStruct(shape, np.float32)
    model = jax.eval_shape(lambda: make_coatnet(CONFIG).init(0, image))
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        return rng.normal(size=leaf.shape).astype(np.float32)

    return jax.tree.map(draw, (model.params, model.state))


@functools.cache
def tensors() -> dict[str, np.ndarray]:
    return write_timm(CONFIG, *drawn())


def test_what_is_written_is_read():
    for found, right in zip(read_timm(CONFIG, tensors()), drawn(), strict=True):
        own, other = named_leaves(found), named_leaves(right)
        assert own.keys() == other.keys()
        for path, leaf in own.items():
            np.testing.assert_array_equal(leaf, other[path], err_msg=path)


def test_tensors_are_as_theirs():
    params, state = drawn()
    own = params["s3"]["attention"]
    qkv = tensors()["stages.2.blocks.2.attn.qkv.weight"]
    assert qkv.shape == (96, 32, 1, 1)
    # The rows of the second head: queries, keys, values.
    parts = qkv[48:, :, 0, 0].reshape(3, 16, 32)
    for part, name in zip(parts, ("query", "key", "value"), strict=True):
        np.testing.assert_array_equal(part.T, own[name]["kernel"][1][:, 16:])
    kernel = params["s1"]["conv"]["kernel"][0]
    found = tensors()["stages.0.blocks.1.conv2_kxk.weight"]
    np.testing.assert_array_equal(found[5, 0], kernel[:, :, 0, 5])
    mean = tensors()["stages.1.blocks.0.pre_norm.running_mean"]
    np.testing.assert_array_equal(mean, state["s2_first"]["norm"]["mean"])
    assert tensors()["stem.norm1.num_batches_tracked"] == 0


def test_keys_without_a_bias_are_written_with_zeros():
    config = dataclasses.replace(CONFIG, key_bias=False)
    params, state = read_timm(config, tensors())
    assert "bias" not in params["s3"]["attention"]["key"]
    bias = write_timm(config, params, state)["stages.2.blocks.1.attn.qkv.bias"]
    right = tensors()["stages.2.blocks.1.attn.qkv.bias"].reshape(2, 3, 16).copy()
    right[:, 1] = 0
    np.testing.assert_array_equal(bias.reshape(2, 3, 16), right)


def test_tensors_that_do_not_fit_raise():
    changed = {**tensors(), "head.extra": np.zeros(1)}
    del changed["head.fc.bias"]
    message = r"1 are missing \(head.fc.bias\) and 1 are unknown \(head.extra\); give"
    with pytest.raises(ValueError, match=message):
        read_timm(CONFIG, changed)
    wide = {**tensors(), "head.fc.bias": np.zeros(11)}
    with pytest.raises(
        ValueError, match=r"head/logits/bias .* \(11,\), but has \(10,\)"
    ):
        read_timm(CONFIG, wide)


def test_norm_that_timm_does_not_have_raises():
    config = dataclasses.replace(CONFIG, norm="group")
    with pytest.raises(ValueError, match=r"norm='group', but timm's .* norm='batch'"):
        read_timm(config, tensors())
    with pytest.raises(ValueError, match=r"norm='group', but timm's"):
        write_timm(config, *drawn())
