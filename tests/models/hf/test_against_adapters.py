"""Are adapters read, trained and written as PEFT has them?"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.models.hf import adapters
from jaxpar.models.hf.pretrained import from_huggingface
from jaxpar.tree import named_leaves
from tests.models.hf.published import Published, reload
from tests.models.hf.published_adapters import publish_adapter, reload_adapter

# PEFT calls what transformers will remove.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"],
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "r": 3,
            "lora_alpha": 5,
            "target_modules": ["k_proj", "gate_proj", "up_proj"],
            "use_rslora": True,
        },
    ),
}


def adapted(right: Published) -> tuple[Any, jaxpar.Engine]:
    folder = right.folder.with_name("adapter")
    ours = from_huggingface(right.folder, adapter=folder)
    engine = jaxpar.initialize(
        model=ours.model,
        loss_fn=ours.loss_fn,
        optimizer=optax.sgd(1.0),
        sample_batch=right.batch,
        mesh=jaxpar.MeshShape(data=1),
        devices=jax.devices()[:1],
        trainable=nnx.LoRAParam,
        check_loss=False,
    )
    ours.load(engine)
    ours.load_adapter(engine, folder)
    return ours, engine


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_files_are_theirs(name: str, tmp_path: Path) -> None:
    model, how = CASES[name]
    right = publish_adapter(model, tmp_path, **how)
    ours, engine = adapted(right)
    logits = jax.jit(lambda m, t: m(t))(engine.model(), right.tokens)
    np.testing.assert_allclose(logits, right.logits, atol=1e-4)

    ours.save_adapter(engine, tmp_path / "again")
    again = reload_adapter(right.folder, tmp_path / "again", right.tokens)
    np.testing.assert_allclose(again, right.logits, atol=1e-5)
    ours.save(engine, tmp_path / "merged")
    whole = reload(tmp_path / "merged", right.tokens)
    np.testing.assert_allclose(whole, right.logits, atol=1e-4)

    before = {k: np.asarray(x) for k, x in named_leaves(engine.state.params).items()}
    found = engine.step(right.batch)
    assert float(found["loss"]) == pytest.approx(right.loss, rel=1e-5)
    leaves = adapters.adapter_leaves(ours.leaves(), ours.config.lora)
    for path, leaf in leaves.items():
        grad = before[path] - np.asarray(named_leaves(engine.state.params)[path])
        for part, own in leaf.split(grad, None):
            theirs = part.name.replace(".weight", ".default.weight")
            expected = right.grads[theirs]
            error = np.linalg.norm(own - expected)
            assert error <= 1e-4 * np.linalg.norm(expected) + 1e-7, theirs
