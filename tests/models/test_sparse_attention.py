"""Does a GPT train on a pattern's blocks as dense attention under its mask does?"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.model.network import WholeModel
from jaxpar.models import (
    DecoderConfig,
    SparseSelfAttention,
    decoder_loss,
    make_decoder,
    sparse_attention,
)
from jaxpar.sparse_attention import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    SparsityPattern,
    Variable,
    make_layout,
)
from tests.kernels_pallas.oracle import dense_attention, visible_mask

UNI = "unidirectional"
HEADS, LENGTH, VOCAB, ROWS = 4, 120, 64, 8
CONFIG = DecoderConfig(
    vocab_size=VOCAB, seq_len=LENGTH, num_layers=2, num_heads=HEADS, width=32
)
pytestmark = pytest.mark.filterwarnings("ignore:blocks of 16 on tiles")
ALL = Dense(HEADS, attention=UNI)
DIFFERENT = BigBird(HEADS, different_layout_per_head=True, attention=UNI)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1), np.int32)


def config_of(attention: str | SparsityPattern, **more: Any) -> DecoderConfig:
    return dataclasses.replace(CONFIG, attention=attention, **more)


def train(
    config: DecoderConfig, shape: jaxpar.MeshShape, **options: Any
) -> list[float]:
    """Losses of four steps."""
    count = shape.data * shape.pipe * shape.tensor
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-2),
        sample_batch={"tokens": jax.ShapeDtypeStruct(TOKENS.shape, np.int32)},
        mesh=jaxpar.make_mesh(shape, jax.devices()[:count]),
        **options,
    )
    return [float(engine.step({"tokens": TOKENS})["loss"]) for _ in range(4)]


@pytest.fixture(scope="module")
def alone() -> dict[SparsityPattern | str, list[float]]:
    """Losses of one device."""
    one = jaxpar.MeshShape(data=1)
    return {each: train(config_of(each), one) for each in ("auto", ALL, DIFFERENT)}


@pytest.mark.slow
def test_all_blocks_active_train_as_dense_attention(alone) -> None:
    assert alone[ALL] == pytest.approx(alone["auto"], rel=1e-5)
    assert alone[DIFFERENT] != pytest.approx(alone["auto"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (jaxpar.MeshShape(data=2, tensor=2), {"zero": 3}),
        (jaxpar.MeshShape(data=1, tensor=4), {"zero": 0, "accumulate": 2}),
        (jaxpar.MeshShape(data=2, pipe=2, tensor=2), {"zero": 1, "accumulate": 2}),
    ],
    ids=["zero3-d2t2", "t4-acc2", "d2p2t2"],
)
def test_heads_of_their_own_blocks_train_as_on_one_device(
    shape: jaxpar.MeshShape, options: dict[str, Any], alone
) -> None:
    """Heads are split over the tensor axis, and their lists with them."""
    found = train(config_of(DIFFERENT), shape, **options)
    assert found == pytest.approx(alone[DIFFERENT], rel=1e-5)


def model_of(attention: str | SparsityPattern) -> WholeModel:
    return make_decoder(config_of(attention)).init(0, TOKENS[:1, :-1])


def logits(attention: str | SparsityPattern, **inputs: jax.Array) -> jax.Array:
    return model_of(attention)(jnp.asarray(TOKENS[:2, :-1]), **inputs)


def test_segments_hide_other_segments() -> None:
    ids = jnp.asarray(np.repeat([[0, 1, 2], [0, 0, 1]], LENGTH // 3, axis=1))
    dense = logits("auto", segment_ids_BT=ids)
    sparse = logits(ALL, segment_ids_BT=ids)
    np.testing.assert_allclose(sparse, dense, rtol=1e-4, atol=1e-5)
    assert abs(dense - logits("auto")).max() > 1e-3


def test_tokens_that_no_block_shows_change_nothing() -> None:
    pattern = LocalSlidingWindow(HEADS, num_sliding_window_blocks=1)
    model = model_of(pattern)
    tokens = jnp.asarray(TOKENS[:1, :-1])
    changed = tokens.at[0, :16].set(1)
    one, other = model(tokens), model(changed)
    np.testing.assert_array_equal(one[:, 16:], other[:, 16:])
    assert (one[:, :16] != other[:, :16]).any()


@pytest.mark.parametrize(
    "pattern",
    [
        BSLongformer(HEADS, global_block_indices=(5,), attention=UNI),
        BigBird(HEADS, num_random_blocks=3, attention=UNI),
    ],
    ids=lambda pattern: type(pattern).__name__,
)
def test_beginning_of_a_text_is_seen_as_in_the_whole(pattern: SparsityPattern) -> None:
    """Though the pattern alone would be refused, or another, for so few tokens."""
    model = model_of(pattern)
    tokens = jnp.asarray(TOKENS[:2, :LENGTH])
    whole = model(tokens)
    np.testing.assert_allclose(model(tokens[:, :30]), whole[:, :30], atol=1e-5)


@pytest.mark.parametrize(
    "pattern",
    [
        Fixed(HEADS),
        Variable(HEADS, num_random_blocks=1),
        BigBird(HEADS, different_layout_per_head=True),
        BSLongformer(HEADS),
        LocalSlidingWindow(HEADS, attention="bidirectional"),
    ],
    ids=lambda pattern: type(pattern).__name__,
)
def test_layer_sees_both_ways_and_no_padding(pattern: SparsityPattern) -> None:
    """As an encoder uses it: 100 tokens, of which a row has fewer."""
    rng = np.random.default_rng(1)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, 100, HEADS, 8)), jnp.float32)
        for _ in range(3)
    )
    lens = np.array([100, 70])
    layer = SparseSelfAttention(pattern)
    found = layer(q, k, v, kv_seq_lens_B=jnp.asarray(lens))
    mask = visible_mask(make_layout(pattern, 112), 100, 100, causal=False)
    mask = mask & (np.arange(100) < lens[:, None, None, None])
    want, _ = dense_attention(q, k, v, jnp.asarray(mask), 8**-0.5)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


def test_linen_models_call_the_function() -> None:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x_BTD: jax.Array) -> jax.Array:
            q, k, v = (nn.DenseGeneral((HEADS, 8), name=name)(x_BTD) for name in "qkv")
            return sparse_attention(q, k, v, LocalSlidingWindow(HEADS))

    x_BTD = jnp.ones((1, 40, 32))
    layer = Layer()
    params = layer.init(jax.random.key(0), x_BTD)

    def loss(params: Any) -> jax.Array:
        return jnp.square(layer.apply(params, x_BTD)).sum()

    gradients = jax.grad(loss)(params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    assert abs(gradients["params"]["v"]["kernel"]).max() > 0


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (Dense(3, attention=UNI), r"Dense\(num_heads=3\), but the model has num_h.*=4"),
        (Fixed(HEADS), "sees the tokens that a GPT should predict"),
    ],
)
def test_pattern_that_is_not_the_models_is_refused(pattern, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(pattern)


def test_pattern_of_other_heads_is_refused() -> None:
    x = jnp.zeros((1, 32, 2, 8))
    with pytest.raises(ValueError, match=r"LocalSlidingWindow has num_heads=3, .* 2"):
        sparse_attention(x, x, x, LocalSlidingWindow(3))
