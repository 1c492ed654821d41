"""Are published BERTs read and written as transformers computes them?"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import jaxpar
from jaxpar.models import BertConfig, from_huggingface, num_bert_params
from tests.models.hf.comparing import check_values, check_written
from tests.models.hf.published import Published
from tests.models.hf.published_bert import KINDS, publish, reload

CASES: dict[str, dict[str, Any]] = {
    **{task: {"task": task} for task in KINDS},
    **{f"{task}-padded": {"task": task, "padded": True} for task in KINDS},
    "gelu_new": {"task": "masked", "hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    "one-type": {"task": "tokens", "hidden_act": "relu", "type_vocab_size": 3},
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(name: str) -> Published:
        case = dict(CASES[name])
        return publish(case.pop("task"), tmp_path_factory.mktemp(name) / "m", **case)

    return make


def call(model: Any, batch: dict[str, Any]) -> Any:
    """Logits, as `joined` has theirs."""
    keywords = {"token_types_BT": batch["token_types"]}
    mask = batch.get("attention_mask")
    if mask is not None:
        keywords["segment_ids_BT"] = mask
    found = model(batch["tokens"], **keywords)
    words, *rest = found if isinstance(found, tuple) else (found,)
    if mask is not None and words.ndim == 3:
        words = words * mask[..., None]
    return jnp.concatenate([part.ravel() for part in (words, *rest)])


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_theirs(name: str, theirs: Any) -> None:
    check_values(theirs(name), call)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_they_load(name: str, theirs: Any, tmp_path: Path) -> None:
    right, task = theirs(name), CASES[name]["task"]
    check_written(right, tmp_path / "out", lambda out: reload(task, out, right.batch))


@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize("large", [False, True])
def test_numbers_of_parameters_are_theirs(task: str, large: bool) -> None:
    sizes: dict[str, Any] = {}
    config = transformers.BertConfig()
    if large:
        sizes = {"num_layers": 24, "num_heads": 16, "width": 1024}
        config.update(
            {
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "hidden_size": 1024,
                "intermediate_size": 4096,
            }
        )
    with torch.device("meta"):
        model = getattr(transformers, KINDS[task][0])(config)
    count = sum(p.numel() for p in model.parameters())
    assert num_bert_params(BertConfig(task=task, **sizes)) == count


def test_a_new_head_on_their_folder_is_one_that_they_load(
    theirs: Any, tmp_path: Path
) -> None:
    """Of a model of pre-training, with a number of classes that it does not have."""
    right = theirs("pretraining")
    batch = {name: right.batch[name] for name in ("tokens", "token_types")}
    batch["label"] = np.array([6, 0, 1, 3], np.int32)
    ours = from_huggingface(right.folder, task="sequence", num_labels=7)
    engine = jaxpar.initialize(
        model=ours.model,
        loss_fn=ours.loss_fn,
        optimizer=optax.sgd(0.1),
        sample_batch=batch,
        mesh=jaxpar.MeshShape(data=1),
        devices=jax.devices()[:1],
    )
    new = ours.load(engine)
    assert new == ["head/classifier/bias", "head/classifier/kernel"]
    engine.step(batch)
    ours.save(engine, tmp_path / "out")
    found = reload("sequence", tmp_path / "out", batch)
    assert found.size == 4 * 7
    wanted = jax.jit(call)(engine.model(), batch)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_the_oldest_names_of_norms_are_read(theirs: Any, tmp_path: Path) -> None:
    right = theirs("masked")
    tensors = load_file(right.folder / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    old["bert.embeddings.position_ids"] = np.arange(32)[None]
    (tmp_path / "config.json").write_bytes((right.folder / "config.json").read_bytes())
    save_file(old, tmp_path / "model.safetensors")
    again = Published(tmp_path, right.batch, right.logits, right.loss, right.grads)
    check_values(again, call)
