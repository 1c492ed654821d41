"""Are published T5 read, and written as they are named?"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import jaxpar
from jaxpar.models import from_huggingface, make_t5, to_huggingface
from jaxpar.models.hf.pretrained import FAMILIES
from jaxpar.models.t5.config import num_params
from jaxpar.models.t5.hf_family import T5_FAMILY, is_parameter, leaves_of
from jaxpar.tree import named_leaves

TINY: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": 20,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 2,
    "num_decoder_layers": 4,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
FIRST = {**TINY, "feed_forward_proj": "relu", "tie_word_embeddings": True}
SIZES = {
    "vocab_size": 32_128,
    "d_kv": 64,
    "num_decoder_layers": None,
    "relative_attention_num_buckets": 32,
}
COUNTS: dict[str, tuple[dict[str, Any], int]] = {
    "1.1 small": (
        {"d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6},
        76_961_152,
    ),
    "1.1 base": (
        {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12},
        247_577_856,
    ),
    "small": (
        {
            "d_model": 512,
            "d_ff": 2048,
            "num_layers": 6,
            "num_heads": 8,
            "feed_forward_proj": "relu",
            "tie_word_embeddings": True,
        },
        60_506_624,
    ),
}
BATCH = {
    "inputs": np.random.default_rng(0).integers(0, 20, (2, 6)).astype(np.int32),
    "labels": np.random.default_rng(1).integers(0, 20, (2, 4)).astype(np.int32),
}


def write(folder: Path, hf: dict[str, Any] = TINY) -> Path:
    """A folder as others publish it, with parameters at random."""
    config = T5_FAMILY.read_config(hf)
    model = make_t5(config).init(0, BATCH["inputs"], BATCH["labels"])
    to_huggingface(model.params, config, hf, folder)
    return folder


@pytest.mark.parametrize("name", COUNTS)
def test_published_models_have_their_numbers_of_parameters(name: str) -> None:
    """As transformers counts them on the meta device."""
    fields, count = COUNTS[name]
    hf = {**TINY, **SIZES, **fields}
    assert num_params(T5_FAMILY.read_config(hf)) == count


@pytest.mark.parametrize("hf", [TINY, FIRST], ids=["1.1", "first"])
def test_every_leaf_is_made_of_tensors(hf: dict[str, Any]) -> None:
    config = FAMILIES["t5"].read_config(hf)
    given = BATCH["inputs"], BATCH["labels"]
    shapes = jax.eval_shape(lambda: make_t5(config).init(0, *given).params)
    assert leaves_of(config, hf).keys() == named_leaves(shapes).keys()


def test_both_ways_to_say_that_the_head_is_untied_are_read() -> None:
    assert T5_FAMILY.read_config(FIRST).tied_embedding
    assert not T5_FAMILY.read_config(TINY).tied_embedding
    newer = {**TINY, "tie_word_embeddings": True, "scale_decoder_outputs": False}
    assert not T5_FAMILY.read_config(newer).tied_embedding
    older = {k: v for k, v in FIRST.items() if k != "tie_word_embeddings"}
    assert T5_FAMILY.read_config(older).tied_embedding


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feed_forward_proj": "gated-silu"}, "'gated-silu' is not known here; 'relu'"),
        ({"pad_token_id": 3}, "pad_token_id=3 is not known here; 0 is"),
        ({"decoder_start_token_id": 1}, "decoder_start_token_id=1 is not known here"),
    ],
)
def test_fields_that_are_not_known_are_named(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        T5_FAMILY.read_config({**TINY, **change})


def test_copies_of_the_table_and_a_table_by_another_name_are_read(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "model", FIRST)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    assert "shared.weight" in tensors
    assert "lm_head.weight" not in tensors
    expected = from_huggingface(folder).read()
    table = tensors["shared.weight"]
    copies = {f"{stack}.embed_tokens.weight": table for stack in ("encoder", "decoder")}
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies |= {unread: np.ones((8, 2), np.float32), "lm_head.weight": table.copy()}
    assert not any(map(is_parameter, copies.keys() - {"lm_head.weight"}))
    save_file(tensors | copies, file)
    jax.tree.map(
        np.testing.assert_array_equal, from_huggingface(folder).read(), expected
    )
    del tensors["shared.weight"]
    save_file(tensors | copies, file)
    jax.tree.map(
        np.testing.assert_array_equal, from_huggingface(folder).read(), expected
    )


def test_a_mesh_reads_and_writes_what_one_device_does(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    ours = from_huggingface(folder, vocab_size=24)
    shape = jaxpar.MeshShape(pipe=2, tensor=2)
    engine = jaxpar.initialize(
        model=ours.model,
        loss_fn=ours.loss_fn,
        optimizer=optax.sgd(0.1),
        sample_batch=BATCH,
        mesh=shape,
        devices=jax.devices()[: shape.num_devices],
        zero=3,
        check_loss=False,
    )
    assert not ours.load(engine)
    params = named_leaves(jax.device_get(engine.state.params))
    for path, leaf in ours.read().items():
        own = params[path][tuple(slice(0, n) for n in leaf.shape)]
        np.testing.assert_array_equal(own, leaf)
    assert not params["embed/embedding/table"][20:].any()
    assert not params["head/logits/kernel"][:, 20:].any()
    ours.save(engine, tmp_path / "again")
    files = [load_file(x / "model.safetensors") for x in (folder, tmp_path / "again")]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        np.testing.assert_array_equal(tensor, files[1][name])
