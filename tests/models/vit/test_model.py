"""Does the ViT compute what NumPy does, whatever its config and its program are?"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.model.network import WholeModel
from jaxpar.models.classification import classification_loss
from jaxpar.models.vit.config import VitConfig
from jaxpar.models.vit.model import VitBlock, VitHead, make_vit

SMALL = VitConfig(
    image_size=8,
    patch_size=4,
    channels=2,
    num_labels=5,
    num_layers=2,
    num_heads=2,
    width=12,
    key_bias=True,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"patch_stride": 2, "pooling": "mean"},
    "mean": {"pooling": "mean", "key_bias": False, "mlp_width": 20},
    "relu": {"activation": "relu", "qkv_bias": False, "norm_epsilon": 1e-3},
}
IMAGES = jax.random.normal(jax.random.key(0), (3, 8, 8, 2))


def random_vit(config: VitConfig) -> WholeModel:
    """No parameter is at a round number."""
    model = make_vit(config).init(0, IMAGES)
    rng = np.random.default_rng(1)

    def move(leaf: jax.Array) -> jax.Array:
        return leaf + 0.2 * rng.normal(size=leaf.shape).astype(np.float32)

    return model.with_params(jax.tree.map(move, model.params))


def product(x: np.ndarray, layer: dict[str, np.ndarray]) -> np.ndarray:
    return x @ layer["kernel"] + layer.get("bias", 0)


def normalise(x: np.ndarray, layer: dict[str, np.ndarray], epsilon: float) -> Any:
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return x * layer["scale"] + layer["bias"]


def activated(x: np.ndarray, config: VitConfig) -> np.ndarray:
    if config.activation == "relu":
        return np.maximum(x, 0)
    return x * np.vectorize(lambda v: 0.5 * (1 + math.erf(v)))(x / np.sqrt(2))


def attention(x_TD: np.ndarray, layer: dict[str, Any], config: VitConfig) -> np.ndarray:
    split = [
        product(x_TD, layer[name]).reshape(len(x_TD), -1, config.head_size)
        for name in ("query", "key", "value")
    ]
    query, key, value = split
    weights = np.exp(np.einsum("tnh,snh->nts", query, key) / config.head_size**0.5)
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("nts,snh->tnh", weights, value)
    return product(out.reshape(len(x_TD), -1), layer["output"])


def reference_logits(params: dict[str, Any], config: VitConfig) -> np.ndarray:
    """Compute a ViT in fp64 NumPy, image by image, patch by patch."""
    embed, head, size = params["embed"], params["head"], config.patch_size
    rows = []
    for image in np.asarray(IMAGES, np.float64):
        tokens = [embed["class_token"]] if "class_token" in embed else []
        starts = range(0, config.image_size - size + 1, config.stride)
        for top in starts:
            for left in starts:
                patch = image[top : top + size, left : left + size]
                kernel = embed["patch"]["kernel"]
                token = np.einsum("pqc,pqcd->d", patch, kernel)
                tokens.append(token + embed["patch"]["bias"])
        x = np.stack(tokens) + embed["positions"]
        for i in range(config.num_layers):
            block = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
            y = normalise(x, block["attention_norm"], config.norm_epsilon)
            x = x + attention(y, block["attention"], config)
            y = normalise(x, block["mlp_norm"], config.norm_epsilon)
            hidden = activated(product(y, block["mlp"]["up"]), config)
            x = x + product(hidden, block["mlp"]["down"])
        x = normalise(x, head["final_norm"], config.norm_epsilon)
        pooled = x[0] if config.pooling == "class_token" else x.mean(0)
        rows.append(product(pooled, head["classifier"]))
    return np.stack(rows)


@pytest.mark.parametrize("name", VARIANTS)
def test_vit_equals_the_numpy_reference(name: str):
    config = dataclasses.replace(SMALL, **VARIANTS[name])
    model = random_vit(config)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
    want = reference_logits(params, config)
    logits = jax.jit(lambda model, image: model(image))(model, IMAGES)
    np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-4)


def test_programs_of_one_model_have_the_same_loss_and_gradients():
    batch = {"image": IMAGES, "label": jnp.array([0, 4, 2])}
    model = random_vit(SMALL)

    def loss_and_grads(**how: Any) -> Any:
        own = make_vit(dataclasses.replace(SMALL, **how)).init(1, IMAGES)

        def mean_loss(params: Any) -> jax.Array:
            loss = classification_loss(own.with_params(params), batch)
            return loss.total / loss.weight

        return jax.jit(jax.value_and_grad(mean_loss))(model.params)

    loss, grads = loss_and_grads()
    again, others = loss_and_grads(
        remat="save-names", remat_names=("qkv", "mlp_hidden"), unroll=2
    )
    assert float(again) == pytest.approx(float(loss), rel=1e-6)
    whole = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(grads)))
    for got, want in zip(*map(jax.tree.leaves, (others, grads)), strict=True):
        assert np.linalg.norm(got - want) < 1e-6 * whole


def test_half_precision_gives_fp32_logits():
    model = random_vit(SMALL)
    half = model.with_params(
        jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    )
    logits = half(IMAGES)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, model(IMAGES), atol=0.1)


@pytest.mark.parametrize("part", [VitBlock, VitHead])
def test_part_without_dropout_has_no_state_but_parameters(part: Any):
    _, params, rest = nnx.split(part(SMALL, rngs=nnx.Rngs(0)), nnx.Param, ...)
    assert jax.tree.leaves(params)
    assert not jax.tree.leaves(rest)


def test_dropout_differs_from_key_to_key_and_is_off_in_evaluation():
    config = dataclasses.replace(SMALL, dropout=0.5)
    vit = make_vit(config)
    network = vit.make_network(lambda model, image: model(image), IMAGES)
    params = random_vit(SMALL).params

    @jax.jit
    def trained(key: jax.Array) -> jax.Array:
        how = {"training": True}
        return network.run(
            lambda model, image: model(image), (params, {}), key, IMAGES, **how
        )[0]

    first, again, other = (trained(jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    plain = random_vit(SMALL)(IMAGES)
    np.testing.assert_array_equal(
        vit.init(0, IMAGES).with_params(params)(IMAGES), plain
    )


def test_tokens_that_the_tensor_axis_does_not_divide_are_padded():
    """33 of 65 on the first of two devices."""
    config = dataclasses.replace(
        SMALL, image_size=32, num_layers=1, sequence_parallel=True
    )
    image = jnp.zeros((2, *config.image_shape))
    model = make_vit(config).init(0, image)
    with jax.set_mesh(make_mesh(MeshShape(tensor=2), jax.devices()[:2])):
        program = jax.jit(lambda model, image: model(image)).lower(model, image)
    text = program.compile().as_text() or ""
    assert "f32[2,33,12]" in text
    assert "all-gather" in text
