"""Is a published folder read slice by slice, and is what does not fit named?"""

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
from jaxpar.models.decoder.config import num_params
from jaxpar.models.hf.pretrained import (
    FAMILIES,
    from_huggingface,
    to_huggingface,
)
from jaxpar.tree import named_leaves

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}
TOKENS = np.random.default_rng(0).integers(0, 50, (4, 9)).astype(np.int32)


def read_decoder(hf: dict[str, Any]) -> jaxpar.models.DecoderConfig:
    return FAMILIES[hf["model_type"]].read_config(hf)


def write(folder: Path, hf: dict[str, Any] = LLAMA, **how: Any) -> Path:
    """A folder as others publish it, with parameters at random."""
    config = read_decoder(hf)
    model = jaxpar.models.make_decoder(config).init(0, TOKENS)
    to_huggingface(model.params, config, hf, folder, **how)
    return folder


def engine_of(
    ours: Any,
    shape: jaxpar.MeshShape,
    tokens: np.ndarray = TOKENS,
    rate: float = 0.1,
    **given: Any,
) -> jaxpar.Engine:
    return jaxpar.initialize(
        model=ours.model,
        loss_fn=ours.loss_fn,
        optimizer=optax.sgd(rate),
        sample_batch={"tokens": tokens},
        mesh=shape,
        devices=jax.devices()[: shape.num_devices],
        zero=3,
        check_loss=False,
        **given,
    )


def test_any_mesh_reads_the_same_parameters(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", file_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    ours, alone = (from_huggingface(folder, vocab_size=size) for size in (64, 50))
    engine = engine_of(alone, jaxpar.MeshShape(data=1))
    alone.load(engine)
    losses = [float(engine.evaluate({"tokens": TOKENS})["loss"])]
    for shape in (
        jaxpar.MeshShape(data=1),
        jaxpar.MeshShape(data=2, tensor=2),
        jaxpar.MeshShape(data=2, pipe=2),
    ):
        engine = engine_of(ours, shape)
        ours.load(engine)
        table = np.asarray(engine.state.params["embed"]["embedding"]["table"])
        assert not table[50:].any(), "rows that are not theirs are zeros"
        losses.append(float(engine.evaluate({"tokens": TOKENS})["loss"]))
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


def test_what_is_written_has_their_rows_names_and_dtype(tmp_path: Path) -> None:
    first = write(tmp_path / "model")
    ours = from_huggingface(first, vocab_size=64)
    engine = engine_of(ours, jaxpar.MeshShape(data=2))
    ours.load(engine)
    ours.save(engine, tmp_path / "again")
    one, other = (
        load_file(each / "model.safetensors") for each in (first, tmp_path / "again")
    )
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name])
    ours.save(engine, tmp_path / "half", dtype="bfloat16")
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert {x.dtype for x in half.values()} == {jnp.dtype("bfloat16")}
    assert (
        json.loads((tmp_path / "half" / "config.json").read_text())["vocab_size"] == 50
    )
    reread = from_huggingface(tmp_path / "half")
    again = engine_of(reread, jaxpar.MeshShape(data=1))
    reread.load(again)
    assert {x.dtype for x in jax.tree.leaves(again.state.params)} == {
        jnp.dtype("float32")
    }
    with pytest.raises(ValueError, match="exists already"):
        ours.save(engine, tmp_path / "half")


def test_frozen_parameters_are_loaded_and_written_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    ours = from_huggingface(folder)
    shape = jaxpar.MeshShape(data=2)
    engine = engine_of(ours, shape, trainable=["*attention*"])
    ours.load(engine)
    engine.step({"tokens": TOKENS})
    ours.save(engine, tmp_path / "out")
    before, after = (
        load_file(x / "model.safetensors") for x in (folder, tmp_path / "out")
    )
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {
        name for name in before if "attn" in name or "input_layer" in name
    }


def test_what_can_not_be_written_leaves_no_folder(tmp_path: Path) -> None:
    other = {**LLAMA, "num_hidden_layers": 3}
    model = jaxpar.models.make_decoder(read_decoder(other)).init(0, TOKENS)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"has 4 of these, .* have 3"):
        to_huggingface(model.params, read_decoder(LLAMA), LLAMA, out)
    assert not out.exists()
    to_huggingface(model.params, read_decoder(other), other, out)
    assert (out / "config.json").exists()


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    ours = from_huggingface(folder)
    engine = engine_of(ours, jaxpar.MeshShape(data=1))
    name = "model.layers.2.mlp.up_proj.weight"

    def refused(change: dict[str, Any], message: str) -> None:
        changed = {k: v for k, v in {**tensors, **change}.items() if v is not None}
        save_file(changed, file)
        with pytest.raises(ValueError, match=message):
            ours.load(engine)

    refused({name: None}, rf"has no {name} \(1 missing\)")
    refused({"model.extra.weight": np.ones(3)}, r"model\.extra\.weight \(1 left over\)")
    refused({name: np.ones((48, 31), np.float32)}, r"has the shape \(31, 48\), but")
    table = {"model.embed_tokens.weight": np.ones((50, 16), np.float32)}
    refused(table, "do not fit each other")
    save_file(tensors, file)
    other = engine_of(
        from_huggingface(folder, qk_norm="heads"), jaxpar.MeshShape(data=1)
    )
    with pytest.raises(ValueError, match="are not those of the config"):
        ours.load(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "llamb"},
            r"'llamb' is not known; known are .* Did you mean 'llama'",
        ),
        ({"model_type": "falcon"}, "'falcon' is not known"),
        (
            {"hidden_act": "relu"},
            "llama: hidden_act='relu' is not known here; 'silu' is",
        ),
        (
            {"hidden_size": None},
            "llama: the published config has no field 'hidden_size'",
        ),
        ({"attention_bias": True}, "attention_bias=True is not known"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rotary positions of type 'yarn'"),
    ],
)
def test_models_that_are_not_known_are_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    hf = {k: v for k, v in {**LLAMA, **change}.items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ValueError, match=message):
        from_huggingface(tmp_path)


def test_folders_that_hold_no_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        from_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        from_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="does not say which model_type"):
        from_huggingface(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    ours = from_huggingface(tmp_path)
    engine = engine_of(ours, jaxpar.MeshShape(data=1))
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors files"):
        ours.load(engine)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(ValueError, match="is not safetensors"):
        ours.load(engine)


GPT2 = {"model_type": "gpt2", "vocab_size": 50_257, "n_positions": 1024}
LLAMA3 = {
    **LLAMA,
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
MIXTRAL = {
    **LLAMA3,
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
COUNTS: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": ({**GPT2, "n_embd": 768, "n_layer": 12, "n_head": 12}, 124_439_808),
    "medium": ({**GPT2, "n_embd": 1024, "n_layer": 24, "n_head": 16}, 354_823_168),
    "large": ({**GPT2, "n_embd": 1280, "n_layer": 36, "n_head": 20}, 774_030_080),
    "xl": ({**GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
    "llama 3 8b": (LLAMA3, 8_030_261_248),
    "mixtral 8x7b": (MIXTRAL, 46_702_792_704),
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_models_have_their_numbers_of_parameters(name: str) -> None:
    """As transformers counts them on the meta device."""
    hf, count = COUNTS[name]
    assert num_params(read_decoder(hf)) == count


def test_the_closed_form_counts_the_leaves() -> None:
    model = jaxpar.models.make_decoder(read_decoder(LLAMA)).init(0, TOKENS)
    leaves = named_leaves(model.params).values()
    assert sum(x.size for x in leaves) == num_params(read_decoder(LLAMA))
