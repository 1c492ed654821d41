"""Is a model of ours that of theirs?

Logits to 1e-4 and gradients to 1e-4 of their norm, in fp32.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.models.hf.pretrained import from_huggingface
from jaxpar.tree import named_leaves
from tests.models.hf.published import Published

Call = Callable[[Any, dict[str, Any]], Any]


def of_tokens(model: Any, batch: dict[str, Any]) -> Any:
    """The logits of a decoder."""
    return model(batch["tokens"])


def loaded(right: Published, **overrides: Any) -> tuple[Any, jaxpar.Engine]:
    """A published model, and an engine with its parameters."""
    ours = from_huggingface(right.folder, **overrides)
    engine = engine_of(ours, right.batch)
    assert not ours.load(engine), "every leaf is in the folder"
    return ours, engine


def engine_of(ours: Any, batch: dict[str, Any]) -> jaxpar.Engine:
    """An engine of a published model, whose parameters are its own."""
    return jaxpar.initialize(
        model=ours.model,
        loss_fn=ours.loss_fn,
        optimizer=optax.sgd(1.0),
        sample_batch=batch,
        mesh=jaxpar.MeshShape(data=1),
        devices=jax.devices()[:1],
        check_loss=False,
    )


def check_values(
    right: Published,
    call: Call = of_tokens,
    overrides: dict[str, Any] | None = None,
    without_gradient: tuple[str, ...] = (),
) -> None:
    """Compare logits, the loss and its gradients.

    Args:
      right: a model of theirs.
      call: makes logits of a model and a batch of ours.
      overrides: fields of our config.
      without_gradient: tensors of theirs that the loss does not use.
    """
    ours, engine = loaded(right, **(overrides or {}))
    params = jax.tree.map(jnp.copy, engine.state.params)
    logits = jax.jit(call)(engine.model(), right.batch)
    np.testing.assert_allclose(logits, right.logits, atol=1e-4)
    found = engine.step(right.batch)
    assert float(found["loss"]) == pytest.approx(right.loss, rel=1e-5)
    # Of plain SGD at a rate of 1 the step is the gradient.
    grads = jax.tree.map(jnp.subtract, params, engine.state.params)
    whole = np.sqrt(sum(np.sum(x**2) for x in right.grads.values()))
    tensors = _as_tensors(ours, grads, right.grads)
    assert tensors.keys() - right.grads.keys() == set(without_gradient)
    for name, expected in right.grads.items():
        error = np.linalg.norm(tensors[name] - expected)
        assert error <= max(1e-4 * np.linalg.norm(expected), 1e-6 * whole), name


def _as_tensors(ours: Any, grads: Any, names: Any) -> dict[str, np.ndarray]:
    """Gradients of our leaves, by their names in memory."""
    leaves, joined = ours.leaves(names), {}
    for path, grad in named_leaves(grads).items():
        rows = ours.hf.get("vocab_size")
        for piece, part in leaves[path].split(np.asarray(grad), rows):
            joined.setdefault(piece.name, {})[piece.part[0]] = piece.part_dim, part
    found = {}
    for name, parts in joined.items():
        own = [part for _, part in sorted(parts.items())]
        dim, arrays = own[0][0], [array for _, array in own]
        found[name] = np.concatenate(arrays, dim) if len(own) > 1 else arrays[0]
    return found


def check_written(
    right: Published,
    out: Path,
    reload: Callable[[Path], np.ndarray],
    overrides: dict[str, Any] | None = None,
) -> None:
    """Write the model, and compare the logits of theirs that loads it.

    Args:
      right: a model of theirs.
      out: a new folder.
      reload: the logits of their model in a folder.
      overrides: fields of our config.
    """
    ours, engine = loaded(right, **(overrides or {}))
    ours.save(engine, out)
    np.testing.assert_allclose(reload(out), right.logits, atol=1e-5)
