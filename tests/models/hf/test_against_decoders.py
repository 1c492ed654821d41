"""Are published decoders read and written as transformers computes them?"""

import functools
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.models.hf.comparing import check_values, check_written
from tests.models.hf.published import CONFIGS, Published, publish, reload


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(name: str) -> Published:
        return publish(name, tmp_path_factory.mktemp(name) / "model")

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_theirs(name: str, theirs: Any) -> None:
    check_values(theirs(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_they_load(name: str, theirs: Any, tmp_path: Path) -> None:
    right = theirs(name)
    check_written(right, tmp_path / "out", lambda out: reload(out, right.tokens))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_of_a_layer_may_be_one_tensor(name: str, tmp_path: Path) -> None:
    """As version 5 of transformers holds them, and may write them."""
    right = publish(name, tmp_path / "model", save_original_format=False)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert "model.layers.1.mlp.experts.gate_up_proj" in tensors
    check_values(right)
