"""Are patches embedded as a convolution embeds them, and what images are refused?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models.vit.config import VitConfig
from jaxpar.models.vit.embed import PatchEmbedding, VitEmbed, split_patches

CONFIG = VitConfig(image_size=8, patch_size=4, width=12, num_heads=2)
PIXELS = np.random.default_rng(0).normal(size=(2, 8, 12, 3))
IMAGES = jnp.asarray(PIXELS, jnp.float32)


@pytest.mark.parametrize("flatten", [True, False])
def test_patches_are_embedded_as_by_a_convolution(flatten: bool):
    patch = PatchEmbedding(4, 3, 10, flatten=flatten, rngs=nnx.Rngs(0))
    patch.bias[...] = jnp.arange(10.0)
    convolved = jax.lax.conv_general_dilated(
        IMAGES,
        patch.kernel[...],
        window_strides=(4, 4),
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    want = convolved.reshape(2, 6, 10) + jnp.arange(10.0)
    np.testing.assert_allclose(patch(IMAGES), want, rtol=1e-5, atol=1e-5)


def test_patches_are_cut_row_by_row():
    patches = split_patches(IMAGES, 4)
    assert patches.shape == (2, 6, 48)
    np.testing.assert_array_equal(
        patches[1, 5], IMAGES[1, 4:8, 8:12].reshape(-1), "the last is bottom right"
    )


def test_patches_begin_with_unit_variance():
    patch = PatchEmbedding(8, 3, 400, rngs=nnx.Rngs(0))
    tokens = patch(jax.random.normal(jax.random.key(0), (50, 8, 8, 3)))
    assert float(tokens.std()) == pytest.approx(1, rel=0.05)


def test_class_token_is_first_and_every_token_has_its_position():
    embed = VitEmbed(CONFIG, rngs=nnx.Rngs(0))
    image = IMAGES[:, :, :8]
    found = embed(image) - embed.positions[...]
    assert embed.class_token is not None
    for row in found[:, 0]:
        np.testing.assert_allclose(row, embed.class_token[...], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[:, 1:], embed.patch(image), rtol=1e-5, atol=1e-6)


def test_mean_has_no_class_token():
    config = VitConfig(
        image_size=8, patch_size=4, width=12, num_heads=2, pooling="mean"
    )
    embed = VitEmbed(config, rngs=nnx.Rngs(0))
    assert embed.class_token is None
    assert embed(IMAGES[:, :, :8]).shape == (2, 4, 12)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (IMAGES, r"have the shape \(8, 12, 3\), but the model is for \(8, 8, 3\)"),
        (IMAGES[:, :, :8, :1], r"have the shape \(8, 8, 1\), but .* \(8, 8, 3\)"),
        (
            IMAGES[:, :, :8].transpose(0, 3, 1, 2),
            r"have the shape \(3, 8, 8\), .*transpose them",
        ),
        (
            jnp.zeros((2, 8, 8, 3), jnp.uint8),
            r"images are uint8, .* jaxpar\.data\.PreparedImages",
        ),
    ],
)
def test_images_that_do_not_fit_are_refused(image: jax.Array, message: str):
    with pytest.raises(ValueError, match=message):
        VitEmbed(CONFIG, rngs=nnx.Rngs(0))(image)
