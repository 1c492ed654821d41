"""Does the recipe tune a published model, whole and by adapters, and write it?"""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxpar.models import make_decoder
from jaxpar.models.hf.pretrained import FAMILIES, from_huggingface, to_huggingface
from tests.recipes.programs import logged_steps, start

RECIPE = "recipes/finetune.py"
HF = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with its tokenizer, and rows beside it."""
    folder = tmp_path_factory.mktemp("base")
    config = FAMILIES["llama"].read_config(HF)
    model = make_decoder(config).init(0, jnp.zeros((1, 2), int))
    to_huggingface(model.params, config, HF, folder / "llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = [f"What follows {i}? It is {i + 1}." for i in range(400)]
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.save(str(folder / "llama" / "tokenizer.json"))
    rows = [
        {"prompt": f"What follows {i}?", "completion": f"It is {i + 1}."}
        for i in range(600)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text)
    return folder


def arguments(base: Path, run: Path) -> list[str]:
    args = ["--base", str(base / "llama"), "--data", str(base / "rows.jsonl")]
    args += ["--out", str(run), "--steps", "8", "--seq-len", "64"]
    return [*args, "--batch-size", "4", "--eval-batches", "1", "--save-every", "3"]


@pytest.mark.thorough
def test_adapters_are_tuned_moved_merged_and_written(base: Path, tmp_path: Path):
    args = [*arguments(base, tmp_path / "run"), "--lora.rank", "4"]
    done = start(RECIPE, *args, "--learning-rate", "0.02")
    assert done.code == 0, done.text
    assert done.heldout("at step 8") < done.heldout("at step 0") - 0.1
    moved = re.findall(r"held-out (\S+) at step 6\n", done.text)
    assert len(moved) == 2
    assert float(moved[0]) == pytest.approx(float(moved[1]), rel=2e-6)
    assert logged_steps(tmp_path / "run") == list(range(1, 9))
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (base / "llama", tmp_path / "run" / "model")
    )
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {x for x in before if "q_proj" in x or "v_proj" in x}
    assert (tmp_path / "run" / "model" / "tokenizer.json").exists()
    again = from_huggingface(base / "llama", adapter=tmp_path / "run" / "adapter")
    assert again.config.lora.rank == 4


@pytest.mark.thorough
def test_whole_model_is_tuned(base: Path, tmp_path: Path):
    args = [*arguments(base, tmp_path / "run"), "--mesh.data", "2"]
    done = start(RECIPE, *args, "--learning-rate", "0.003")
    assert done.code == 0, done.text
    assert done.heldout("at step 8") < done.heldout("at step 0") - 0.3
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert after["model.embed_tokens.weight"].shape == (300, 32)
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.thorough
def test_what_is_missing_is_said_before_anything_compiles(base: Path, tmp_path: Path):
    done = start(RECIPE, "--out", str(tmp_path / "run"))
    assert done.code != 0
    assert "base='' must be the folder of a Hugging Face model" in done.text
    other = tmp_path / "llama"
    other.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (other / name).write_bytes((base / "llama" / name).read_bytes())
    small = json.dumps({**HF, "vocab_size": 100})
    (other / "config.json").write_text(small)
    args = arguments(base, tmp_path / "run")
    args[1] = str(other)
    done = start(RECIPE, *args)
    assert done.code != 0
    assert re.search(r"vocab_size|100", done.text)
    assert "compil" not in done.text
