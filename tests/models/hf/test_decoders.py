"""Are published decoders read and written as transformers computes them?

Logits to 1e-4 and gradients to 1e-4 of their norm, in fp32.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.models.decoder.hf_leaves import leaves_of
from jaxpar.models.hf.pretrained import from_huggingface
from jaxpar.tree import named_leaves
from tests.models.hf.published import CONFIGS, Published, publish, reload
from tests.models.hf.test_pretrained import engine_of

ONE = jaxpar.MeshShape(data=1)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(name: str) -> Published:
        return publish(name, tmp_path_factory.mktemp(name) / "model")

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_theirs(name: str, theirs: Any) -> None:
    right = theirs(name)
    ours = from_huggingface(right.folder)
    engine = engine_of(ours, ONE, right.tokens, rate=1.0)
    ours.load(engine)
    params = jax.tree.map(jnp.copy, engine.state.params)
    logits = jax.jit(lambda m, t: m(t))(engine.model(), right.tokens)
    np.testing.assert_allclose(logits, right.logits, atol=1e-4)
    found = engine.step({"tokens": right.tokens})
    assert float(found["loss"]) == pytest.approx(right.loss, rel=1e-5)
    # Of plain SGD at a rate of 1 the step is the gradient.
    grads = jax.tree.map(jnp.subtract, params, engine.state.params)
    whole = np.sqrt(sum(np.sum(x**2) for x in right.grads.values()))
    leaves = leaves_of(ours.config, ours.hf["model_type"])
    joined: dict[str, dict[int, np.ndarray]] = {}
    for path, grad in named_leaves(grads).items():
        for piece, part in leaves[path].split(np.asarray(grad), None):
            joined.setdefault(piece.name, {})[piece.part[0]] = part
    assert joined.keys() == right.grads.keys()
    for tensor, parts in joined.items():
        own = [part for _, part in sorted(parts.items())]
        grad = np.concatenate(own, -1) if len(own) > 1 else own[0]
        expected = right.grads[tensor]
        error = np.linalg.norm(grad - expected)
        assert error <= max(1e-4 * np.linalg.norm(expected), 1e-6 * whole), tensor


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_they_load(name: str, theirs: Any, tmp_path: Path) -> None:
    right = theirs(name)
    ours = from_huggingface(right.folder)
    engine = engine_of(ours, ONE, right.tokens, rate=1.0)
    ours.load(engine)
    ours.save(engine, tmp_path / "out")
    np.testing.assert_allclose(
        reload(tmp_path / "out", right.tokens), right.logits, atol=1e-5
    )
