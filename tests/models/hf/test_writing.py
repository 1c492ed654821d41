"""Are leaves written as a published folder?"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpar.models.hf.leaves import per_layer
from jaxpar.models.hf.writing import write_folder

HF = {"model_type": "some", "vocab_size": 7}
FUSED = {
    name: per_layer("layer.{}.fused", range(2), part=(number, 2))
    for number, name in enumerate(("query", "key"))
}
ARRAYS = {
    name: np.full((2, 3, 4), number, np.float32)
    for number, name in enumerate(("query", "key"))
}


def test_parts_of_a_tensor_are_joined_in_their_order(tmp_path: Path) -> None:
    for order in (("query", "key"), ("key", "query")):
        out = tmp_path / order[0]
        write_folder(((name, ARRAYS[name]) for name in order), FUSED, HF, out)
        found = load_file(out / "model.safetensors")
        assert found.keys() == {"layer.0.fused", "layer.1.fused"}
        for tensor in found.values():
            assert tensor.shape == (3, 8)
            np.testing.assert_array_equal(tensor[:, :4], 0.0)
            np.testing.assert_array_equal(tensor[:, 4:], 1.0)
        assert json.loads((out / "config.json").read_text())["model_type"] == "some"


def test_files_are_of_bounded_size_and_have_an_index(tmp_path: Path) -> None:
    write_folder(ARRAYS.items(), FUSED, HF, tmp_path / "out", file_bytes=100)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * 3 * 8 * 4
    assert set(index["weight_map"].values()) == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_leaves_that_do_not_belong_or_are_missing_are_named(tmp_path: Path) -> None:
    strange = {**ARRAYS, "other": np.ones(3)}
    with pytest.raises(ValueError, match="other is not a parameter of this some"):
        write_folder(strange.items(), FUSED, HF, tmp_path / "one")
    with pytest.raises(ValueError, match="key: missing parameters"):
        write_folder([("query", ARRAYS["query"])], FUSED, HF, tmp_path / "two")
