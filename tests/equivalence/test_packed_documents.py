"""Do packed documents train a GPT as each document alone does, in plain JAX?

The oracle runs the model on every document by itself, without segments or padding, on
one device, with `jax.value_and_grad`: nothing of a document can reach another. Losses
and gradients to 1e-6 relative, leaf by leaf; 6e-7 was measured.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.data import PackedDocuments, Tokens
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.tree import named_leaves

VOCAB, LENGTH, ROWS = 64, 24, 8
# No document is longer than a row, so that the oracle has them as they are.
SIZES = [25, *[11] * 7, *[8] * 7, *[3] * 6]
RATE = 1e5
"""Of gradient descent: so large that parameters after a step are its gradients."""

POSITIONS = ("learned", "rotary")


def make_config(positions: str) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=VOCAB,
        seq_len=LENGTH,
        num_layers=2,
        num_heads=2,
        width=32,
        positions=positions,
    )


@functools.cache
def packed_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    ids = rng.integers(1, VOCAB, sum(SIZES), dtype=np.uint16)
    starts = np.cumsum(SIZES) - SIZES
    mask = rng.integers(0, 2, len(ids), dtype=np.uint8)
    mask[starts + 1] = 1  # Of a document without a target no row is made.
    tokens = Tokens((ids,), ("random",), starts=starts, loss_mask=mask)
    batch = PackedDocuments(tokens, seq_len=LENGTH).read(range(ROWS))
    assert batch["segment_ids"].max() > 2, "rows of several documents"
    assert (batch["segment_ids"] == 0).any(), "padding"
    return batch


def documents(batch: dict[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each document's tokens, and the weights of its targets."""
    found = []
    for tokens, segments, weights in zip(
        batch["tokens"], batch["segment_ids"], batch["weights"], strict=True
    ):
        for segment in range(1, segments.max() + 1):
            places = np.flatnonzero(segments == segment)
            found.append((tokens[places], weights[places[:-1]]))
    return found


def loss_of(network: Any, params: Any, tokens: jax.Array, weights: jax.Array) -> Any:
    def total(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model(batch["tokens"][None, :-1])[0]
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["tokens"][1:]
        )
        return (losses * batch["weights"]).sum()

    key, batch = jax.random.key(0), {"tokens": tokens, "weights": weights}
    return network.run(total, (params, {}), key, batch, training=True)[0]


@functools.cache
def oracle(positions: str) -> tuple[float, dict[str, np.ndarray], dict[str, Any]]:
    """The mean loss, the gradients and the parameters they are taken at."""
    model = make_decoder(make_config(positions))
    network = model.make_network(
        decoder_loss, {"tokens": np.zeros((1, LENGTH + 1), int)}
    )
    params = jax.device_get(make_engine(positions, {}).state.params)
    found = documents(packed_batch())
    grad_fn = jax.jit(jax.value_and_grad(functools.partial(loss_of, network)))
    totals = [grad_fn(params, *map(jnp.asarray, document)) for document in found]
    weight = sum(weights.sum() for _, weights in found)
    total, grads = jax.tree.map(
        lambda *each: np.sum(np.float64(each), axis=0) / weight, *totals
    )
    return float(total), named_leaves(grads), named_leaves(params)


def make_engine(positions: str, mesh: dict[str, int], **given: Any) -> jaxpar.Engine:
    return jaxpar.initialize(
        model=make_decoder(make_config(positions)),
        loss_fn=decoder_loss,
        optimizer=optax.sgd(RATE),
        sample_batch=packed_batch(),
        mesh=jaxpar.make_mesh(
            jaxpar.MeshShape(**{"data": 1, **mesh}),
            jax.devices()[: int(np.prod(list(mesh.values()) or [1]))],
        ),
        **given,
    )


MESHES: dict[str, dict[str, Any]] = {
    "one device": {"mesh": {}},
    "zero 3": {"mesh": {"data": 2, "tensor": 2}, "zero": 3},
    "pipeline": {"mesh": {"data": 2, "pipe": 2}, "zero": 1, "accumulate": 2},
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", MESHES)
def test_packed_documents_train_as_each_alone(name: str, positions: str):
    loss, grads, before = oracle(positions)
    engine = make_engine(positions, **MESHES[name])
    metrics = engine.step(packed_batch())
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)
    after = named_leaves(jax.device_get(engine.state.params))
    assert after.keys() == grads.keys()
    for leaf, grad in grads.items():
        want = before[leaf].astype(np.float64) - RATE * grad
        error = np.linalg.norm(after[leaf] - want)
        assert error < 1e-6 * np.linalg.norm(want), leaf
        assert np.linalg.norm(before[leaf]) < 0.1 * np.linalg.norm(want), leaf
