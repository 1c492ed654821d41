"""Which adapters are read, and which are refused by name?"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpar.models.hf import adapters
from jaxpar.models.hf.leaves import MATRIX, one, per_layer
from jaxpar.models.lora import LoraConfig

LEAVES = {
    "blocks/attention/query/kernel": per_layer("l.{}.q_proj.weight", range(2), MATRIX),
    "blocks/mlp/up/kernel": per_layer("l.{}.up_proj.weight", range(2), MATRIX),
    "head/logits/kernel": one("lm_head.weight", MATRIX),
}
HF: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
}


def write(folder: Path, **change: Any) -> Path:
    (folder / adapters.CONFIG).write_text(json.dumps({**HF, **change}))
    return folder


def test_a_config_is_read_in_our_names(tmp_path: Path) -> None:
    found = adapters.read_adapter(write(tmp_path), LEAVES)
    assert found == LoraConfig(rank=4, alpha=8.0, targets=("query",))
    write(tmp_path, use_rslora=True, target_modules=["up_proj", "q_proj"])
    found = adapters.read_adapter(tmp_path, LEAVES)
    assert (found.targets, found.scale) == (("up", "query"), 4.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not known here; False is"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not known here; 'LORA' is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"target_modules": ["c_attn"]}, "must be a list of q_proj, up_proj"),
        ({"target_modules": ".*proj"}, "must be a list of"),
    ],
)
def test_what_is_not_known_is_named(tmp_path: Path, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        adapters.read_adapter(write(tmp_path, **change), LEAVES)


def test_no_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json"):
        adapters.read_adapter(tmp_path, LEAVES)


def test_tensors_are_written_once_and_read_again(tmp_path: Path) -> None:
    config = LoraConfig(rank=4, targets=("query", "up", "gate"))
    leaves = adapters.adapter_leaves(LEAVES, config)
    names = {part.name for x in leaves.values() for part in x.piece.parts()}
    assert "base_model.model.l.1.up_proj.lora_B.weight" in names
    tensors = {name: np.ones((2, 4), np.float32) for name in names}
    adapters.write_adapter(tmp_path / "out", tensors, config, LEAVES)
    found = adapters.read_adapter(tmp_path / "out", LEAVES)
    assert found.targets == ("query", "up")
    with pytest.raises(ValueError, match="exists already"):
        adapters.write_adapter(tmp_path / "out", tensors, config, LEAVES)


def test_a_kernel_that_shares_its_tensor_has_none() -> None:
    part = per_layer("h.{}.c_attn.weight", range(2), part=(0, 3))
    fused = {"blocks/attention/query/kernel": part}
    with pytest.raises(ValueError, match="holds query beside others"):
        adapters.adapter_leaves(fused, LoraConfig(rank=2))
    with pytest.raises(ValueError, match="are no kernels of this model"):
        adapters.adapter_leaves(LEAVES, LoraConfig(rank=2, targets=("down",)))


def test_merging_adds_the_update_to_its_kernel_alone() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "blocks/q/kernel": rng.normal(size=(2, 3, 5)),
        "blocks/q/adapter/a": rng.normal(size=(2, 3, 1)),
        "blocks/q/adapter/b": rng.normal(size=(2, 1, 5)),
        "blocks/up/kernel": rng.normal(size=(2, 3, 3)),
    }
    found = dict(adapters.merged(list(arrays), arrays.__getitem__, 2.0))
    assert found.keys() == {"blocks/q/kernel", "blocks/up/kernel"}
    update = 2 * arrays["blocks/q/adapter/a"] @ arrays["blocks/q/adapter/b"]
    right = arrays["blocks/q/kernel"] + update
    np.testing.assert_allclose(found["blocks/q/kernel"], right, rtol=1e-5)
    np.testing.assert_array_equal(found["blocks/up/kernel"], arrays["blocks/up/kernel"])
