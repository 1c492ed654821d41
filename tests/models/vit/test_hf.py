"""Which ViTs of Hugging Face are known, and which of their leaves are new?"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import jaxpar
from jaxpar.models.experts.config import ExpertsConfig
from jaxpar.models.hf.pretrained import from_huggingface, to_huggingface
from jaxpar.models.vit.config import VitConfig, num_params
from jaxpar.models.vit.hf import VITS, describe
from jaxpar.models.vit.model import make_vit
from jaxpar.tree import named_leaves

HF: dict[str, Any] = {
    "model_type": "vit",
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "id2label": {"0": "cat", "1": "dog", "2": "cow"},
}
B16 = {
    "model_type": "vit",
    "image_size": 224,
    "patch_size": 16,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_labels": 1000,
}
L16 = {
    **B16,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
HEAD = ["head/classifier/bias", "head/classifier/kernel"]


def read_vit(hf: dict[str, Any], **overrides: Any) -> VitConfig:
    return VITS["vit"].read_config(hf, **overrides)


def images_of(config: VitConfig) -> jax.Array:
    return jnp.ones((2, *config.image_shape))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = read_vit(HF)
    model = make_vit(config).init(0, images_of(config))
    to_huggingface(model.params, config, HF, tmp_path / "model")
    return tmp_path / "model"


def engine_of(ours: Any, **given: Any) -> jaxpar.Engine:
    image = np.asarray(images_of(ours.config))
    return jaxpar.initialize(
        model=ours.model,
        loss_fn=ours.loss_fn,
        optimizer=optax.sgd(0.1),
        sample_batch={"image": image, "label": np.array([0, 1], np.int32)},
        mesh=jaxpar.MeshShape(data=2),
        devices=jax.devices()[:2],
        check_loss=False,
        **given,
    )


# As transformers counts them on the meta device (test_against_vit.py).
@pytest.mark.parametrize(("hf", "count"), [(B16, 86_567_656), (L16, 304_326_632)])
def test_published_vits_have_their_numbers_of_parameters(
    hf: dict[str, Any], count: int
):
    assert num_params(read_vit(hf)) == count


def test_tensors_have_their_names_and_shapes(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    assert len(shapes) == 8 + 2 * 16
    assert shapes["vit.embeddings.cls_token"] == (1, 1, 16)
    assert shapes["vit.embeddings.position_embeddings"] == (1, 5, 16)
    patch = "vit.embeddings.patch_embeddings.projection.weight"
    assert shapes[patch] == (16, 1, 4, 4)
    query = "vit.encoder.layer.1.attention.attention.query.weight"
    assert shapes[query] == (16, 16)
    assert shapes["classifier.weight"] == (3, 16)


def test_other_labels_draw_a_new_head_and_keep_the_rest(folder: Path, tmp_path: Path):
    ours = from_huggingface(folder, num_labels=5)
    assert ours.check() == HEAD
    engine = engine_of(ours, zero=3)
    drawn = jax.device_get(engine.state.params["head"]["classifier"]["kernel"])
    assert ours.load(engine) == HEAD
    named = named_leaves(jax.device_get(engine.state.params))
    np.testing.assert_array_equal(named["head/classifier/kernel"], drawn)
    kept = from_huggingface(folder).read()
    for path in named.keys() - {*HEAD}:
        np.testing.assert_array_equal(named[path], kept[path])
    ours.save(engine, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["label2id"] == {f"LABEL_{label}": label for label in range(5)}
    again = from_huggingface(tmp_path / "out")
    assert again.config.num_labels == 5
    assert not again.check()


def test_labels_of_the_same_number_keep_their_names():
    assert describe(read_vit(HF), HF) == HF
    assert len(describe(read_vit(HF, num_labels=4), HF)["id2label"]) == 4


def test_classifier_that_its_config_does_not_fit_is_named(folder: Path):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "classifier.weight": np.ones((4, 16), np.float32)}, file)
    ours = from_huggingface(folder)
    with pytest.raises(ValueError, match=r"classifier\.weight: .* do not fit each oth"):
        ours.load(engine_of(ours))


def test_encoder_without_a_prefix_and_with_a_pooler_is_read(folder: Path):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    encoder = {
        name.removeprefix("vit."): tensor
        for name, tensor in tensors.items()
        if name.startswith("vit.")
    }
    save_file({**encoder, "pooler.dense.weight": np.ones((16, 16), np.float32)}, file)
    assert from_huggingface(folder).check() == HEAD


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "silu"}, r"hidden_act='silu' is not known here; 'gelu' or"),
        ({"image_size": [8, 16]}, r"image_size=\[8, 16\] is not known here"),
        ({"hidden_size": None}, r"the published config has no field 'hidden_size'"),
    ],
)
def test_vits_that_are_not_known_are_named(change: dict[str, Any], message: str):
    hf = {name: x for name, x in {**HF, **change}.items() if x is not None}
    with pytest.raises(ValueError, match=message):
        read_vit(hf)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooling": "mean"}, r"pooling='mean' is not known to transformers"),
        ({"experts": ExpertsConfig(num=2)}, r"experts.num=2 is not known to trans"),
        ({"patch_stride": 1}, r"patch_stride=1 is not known to transformers"),
        ({"key_bias": False}, r"key_bias=False with qkv_bias=True is not known to"),
    ],
)
def test_vits_that_transformers_has_not_are_not_written(
    change: dict[str, Any], message: str, tmp_path: Path
):
    config = read_vit(HF, **change)
    model = make_vit(config).init(0, images_of(config))
    with pytest.raises(ValueError, match=message):
        to_huggingface(model.params, config, HF, tmp_path / "out")


def test_sides_may_be_given_as_pairs_and_labels_by_number():
    config = read_vit({**HF, "image_size": [8, 8], "id2label": None, "num_labels": 9})
    assert (config.image_size, config.num_labels) == (8, 9)
    assert read_vit({**HF, "id2label": None}).num_labels == 2
