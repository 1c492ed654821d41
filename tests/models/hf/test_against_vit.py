"""Are published ViTs read and written as transformers computes them?"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

from jaxpar.models.hf.pretrained import from_huggingface
from jaxpar.models.vit.config import num_params
from jaxpar.models.vit.hf import VITS
from tests.models.hf.comparing import check_values, check_written, engine_of
from tests.models.hf.published import Published
from tests.models.hf.published_vit import CONFIGS, count, publish, reload

LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(name: str) -> Published:
        return publish(name, tmp_path_factory.mktemp(name) / "model")

    return make


def of_images(model: Any, batch: dict[str, Any]) -> Any:
    return model(batch["image"])


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_theirs(name: str, theirs: Any) -> None:
    check_values(theirs(name), of_images)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_they_load(name: str, theirs: Any, tmp_path: Path) -> None:
    right = theirs(name)
    check_written(right, tmp_path / "out", lambda out: reload(out, right.batch))


def test_new_labels_draw_a_classifier_that_they_load(
    theirs: Any, tmp_path: Path
) -> None:
    right = theirs("vit")
    ours = from_huggingface(right.folder, num_labels=3)
    new = ["head/classifier/bias", "head/classifier/kernel"]
    assert ours.check() == new
    batch = {**right.batch, "label": right.batch["label"] % 3}
    engine = engine_of(ours, batch)
    assert ours.load(engine) == new
    ours.save(engine, tmp_path / "out")
    logits = reload(tmp_path / "out", batch)
    assert logits.shape == (4, 3)
    own = jax.jit(of_images)(engine.model(), batch)
    np.testing.assert_allclose(logits, own, atol=1e-5)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [*written["id2label"]] == ["0", "1", "2"]


def test_encoder_without_a_classifier_is_read(theirs: Any, tmp_path: Path) -> None:
    """As google/vit-base-patch16-224-in21k, whose pooler belongs to no leaf."""
    right = theirs("vit")
    encoder = transformers.ViTModel.from_pretrained(right.folder)
    encoder.save_pretrained(tmp_path / "encoder")
    names = load_file(tmp_path / "encoder" / "model.safetensors")
    assert any(name.startswith("pooler") for name in names)
    ours = from_huggingface(tmp_path / "encoder")
    assert ours.check() == ["head/classifier/bias", "head/classifier/kernel"]
    whole = from_huggingface(right.folder).read()
    for path, leaf in ours.read().items():
        np.testing.assert_array_equal(leaf, whole[path])


@pytest.mark.parametrize(("fields", "millions"), [({}, 86), (LARGE, 304)])
def test_counts_are_theirs(fields: dict[str, Any], millions: int) -> None:
    hf = transformers.ViTConfig(**fields, num_labels=1000).to_dict()
    config = VITS["vit"].read_config(hf)
    assert num_params(config) == count(**fields, num_labels=1000)
    assert num_params(config) // 10**6 == millions
