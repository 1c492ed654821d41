"""Does a CoAtNet classify images, and which state has it?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.models.classification import classification_loss
from jaxpar.models.coatnet.model import (
    CoatnetHead,
    CoatnetStem,
    make_block,
    make_coatnet,
)
from jaxpar.models.coatnet.presets import coatnet_config
from jaxpar.tree import named_leaves

SMALL = functools.partial(
    coatnet_config, "coatnet-tiny", image_size=16, widths=(4, 4, 16, 16), stem_width=4
)
IMAGE = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3)).astype(np.uint8)
BATCH = {"image": IMAGE, "label": np.arange(4) % 2}


def test_integers_are_divided_by_255():
    stem = CoatnetStem(SMALL(), rngs=nnx.Rngs(0))
    image = jnp.asarray(IMAGE)
    maps = stem(image)
    assert (maps.shape, maps.dtype) == ((4, 8, 8, 4), jnp.float32)
    np.testing.assert_allclose(stem(image.astype(float) / 255), maps, atol=1e-5)


def test_head_classifies_the_mean_of_all_places():
    head = CoatnetHead(SMALL(), rngs=nnx.Rngs(0))
    maps = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 3, 16)))
    logits = head(maps.astype(jnp.bfloat16))
    assert (logits.shape, logits.dtype) == ((2, 10), jnp.float32)
    mean = head.norm(maps.mean((1, 2)))
    want = head.logits(jnp.tanh(head.hidden(mean)))
    np.testing.assert_allclose(head(maps), want, atol=1e-6)
    np.testing.assert_allclose(head(maps[:, ::-1]), want, atol=1e-6)


def test_first_blocks_stand_between_sections():
    sections = make_coatnet(SMALL()).sections
    assert list(sections) == [
        "s1",
        "s2_first",
        "s2",
        "s3_first",
        "s3",
        "s4_first",
        "s4",
    ]
    assert [sections[f"s{level}"][1] for level in (1, 2, 3, 4)] == [1, 1, 2, 1]


def test_block_of_a_level_is_of_its_kind():
    kinds = [make_block(SMALL(), level).func.__name__ for level in range(4)]
    assert kinds == ["MBConv", "MBConv", "GridAttentionBlock", "GridAttentionBlock"]


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_state_is_running_statistics_or_none(norm: str):
    image = jax.ShapeDtypeStruct(IMAGE.shape, np.uint8)
    model = jax.eval_shape(lambda: make_coatnet(SMALL(norm=norm)).init(0, image))
    state = named_leaves(model.state)
    if norm == "group":
        assert not state
    else:
        assert state["s2/widen_norm/mean"].shape == (1, 16)
        assert {path.split("/")[-1] for path in state} == {"mean", "variance"}
        assert len(state) == 2 * (1 + 4 * 3)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 32, 32, 3), r"have shape \(32, 32, 3\), but the model is for \(16, 16, 3"),
        ((1, 16, 16, 1), r"have shape \(16, 16, 1\), but .*image_size and channels"),
    ],
)
def test_image_of_another_size_raises(shape: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        make_coatnet(SMALL()).init(0, np.zeros(shape))


def test_pipeline_refuses_batch_statistics_before_it_compiles():
    message = r"examples: embed/norm/mean \(the rows of the batch\).* more; .*GroupNorm"
    with pytest.raises(ValueError, match=message):
        jaxpar.initialize(
            model=make_coatnet(SMALL(norm="batch", allow_uneven=True)),
            loss_fn=classification_loss,
            optimizer=optax.sgd(0.1),
            sample_batch=BATCH,
            mesh=jaxpar.MeshShape(data=1, pipe=2),
            devices=jax.devices()[:2],
        )
