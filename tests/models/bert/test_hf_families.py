"""Is a BERT read into any mesh, written again, and given another task's head?"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import jaxpar
from jaxpar.models import from_huggingface, make_bert, to_huggingface
from jaxpar.models.bert.hf_families import BERTS
from jaxpar.models.hf.pretrained import FAMILIES
from tests.models.bert.test_hf_config import HF, read

TOKENS = np.random.default_rng(0).integers(0, 64, (4, 8)).astype(np.int32)
MASKED = {"tokens": TOKENS, "labels": TOKENS}
ROWS = {"tokens": TOKENS, "label": np.array([2, 0, 1, 1], np.int32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = make_bert(read(HF)).init(0, TOKENS)
    to_huggingface(model.params, read(HF), HF, tmp_path / "masked")
    return tmp_path / "masked"


def engine_of(
    ours: Any, batch: dict[str, Any], shape: jaxpar.MeshShape
) -> jaxpar.Engine:
    return jaxpar.initialize(
        model=ours.model,
        loss_fn=ours.loss_fn,
        optimizer=optax.sgd(0.1),
        sample_batch=batch,
        mesh=shape,
        devices=jax.devices()[: shape.num_devices],
        zero=3,
        check_loss=False,
    )


def test_bert_is_among_the_families():
    assert FAMILIES["bert"] is BERTS["bert"]


def test_what_a_mesh_reads_it_writes(folder: Path):
    ours = from_huggingface(folder, vocab_size=68)
    engine = engine_of(ours, MASKED, jaxpar.MeshShape(data=2, tensor=2))
    assert ours.load(engine) == []
    params = engine.state.params
    assert not np.asarray(params["head"]["words"]["bias"])[64:].any()
    assert not np.asarray(params["embed"]["embedding"]["table"])[64:].any()
    out = folder.with_name("out")
    ours.save(engine, out)
    one, other = (load_file(each / "model.safetensors") for each in (folder, out))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name])


def test_another_tasks_folder_loads_with_a_new_head(folder: Path):
    ours = from_huggingface(folder, task="sequence", num_labels=3)
    engine = engine_of(ours, ROWS, jaxpar.MeshShape(data=2))
    drawn = np.asarray(engine.state.params["head"]["classifier"]["kernel"])
    new = {"head/classifier/kernel", "head/classifier/bias"}
    assert {*ours.load(engine)} == new | {
        "head/pooler/dense/kernel",
        "head/pooler/dense/bias",
    }
    kept = np.asarray(engine.state.params["head"]["classifier"]["kernel"])
    np.testing.assert_array_equal(kept, drawn)
    out = folder.with_name("classes")
    ours.save(engine, out)
    again = from_huggingface(out)
    assert (again.config.task, again.config.num_labels) == ("sequence", 3)
    assert again.check() == []


def test_a_lost_tensor_of_the_body_is_named(folder: Path):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "bert.encoder.layer.1.output.dense.bias"
    save_file({k: v for k, v in tensors.items() if k != name}, file)
    with pytest.raises(ValueError, match=rf"has no {name} \(1 missing\)"):
        from_huggingface(folder, task="tokens").check()
