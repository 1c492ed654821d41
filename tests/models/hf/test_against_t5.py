"""Are published T5 read and written as transformers computes them?"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.hf.comparing import check_values, check_written
from tests.models.hf.published import Published
from tests.models.hf.published_t5 import CONFIGS, publish, reload


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(name: str) -> Published:
        return publish(name, tmp_path_factory.mktemp(name) / "model")

    return make


def logits_of(model: Any, batch: dict[str, Any]) -> jax.Array:
    """The logits of a T5, of the labels one place later."""
    labels = jnp.maximum(batch["labels"], 0)
    read = jnp.pad(labels[:, :-1], ((0, 0), (1, 0)))
    return model(batch["inputs"], read, segment_ids_BS=batch["attention_mask"])


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_theirs(name: str, theirs: Any) -> None:
    check_values(theirs(name), logits_of)


@pytest.mark.parametrize("name", CONFIGS)
def test_xlas_attention_is_theirs(name: str, theirs: Any) -> None:
    check_values(theirs(name), logits_of, {"attention": "xla"})


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_they_load(name: str, theirs: Any, tmp_path: Path) -> None:
    right = theirs(name)
    check_written(right, tmp_path / "out", lambda out: reload(out, right.batch))


def test_an_older_config_is_read_and_written_alike(theirs: Any, tmp_path: Path) -> None:
    """As version 4 wrote T5 1.1: ``tie_word_embeddings`` is false."""
    right, folder = theirs("1.1"), tmp_path / "older"
    folder.mkdir()
    for file in right.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    hf = json.loads((folder / "config.json").read_text())
    assert hf.pop("scale_decoder_outputs") is False
    hf["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(hf))
    older = Published(folder, right.batch, right.logits, right.loss, right.grads)
    np.testing.assert_array_equal(reload(folder, right.batch), right.logits)
    check_values(older, logits_of)
    check_written(older, tmp_path / "out", lambda out: reload(out, right.batch))
