"""Do packed or padded documents train a GPT as each alone does, in plain JAX?

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


@functools.cache
def padded_batch() -> dict[str, np.ndarray]:
    """A document a row; every second begins with its padding."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1), np.int32)
    mask = np.zeros_like(tokens)
    for row, size in enumerate((LENGTH + 1, 20, 11, 2, 24, 3, 17, 6)):
        mask[row, -size:] = 1
        if row % 2:
            mask[row] = mask[row, ::-1]
    weights = rng.integers(1, 4, (ROWS, LENGTH)).astype(np.float32)
    return {"tokens": tokens, "attention_mask": mask, "weights": weights}


BATCHES = {"packed": packed_batch, "padded": padded_batch}


def documents(batch: dict[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each document's tokens, and the weights of its targets."""
    found = []
    segment_ids = batch.get("segment_ids", batch.get("attention_mask"))
    for tokens, segments, weights in zip(
        batch["tokens"], segment_ids, batch["weights"], strict=True
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
def oracle(
    positions: str, kind: str
) -> tuple[float, dict[str, np.ndarray], dict[str, Any]]:
    """The mean loss, the gradients and the parameters they are taken at."""
    model = make_decoder(make_config(positions))
    network = model.make_network(
        decoder_loss, {"tokens": np.zeros((1, LENGTH + 1), int)}
    )
    params = jax.device_get(make_engine(positions, kind, {}).state.params)
    found = documents(BATCHES[kind]())
    grad_fn = jax.jit(jax.value_and_grad(functools.partial(loss_of, network)))
    totals = [grad_fn(params, *map(jnp.asarray, document)) for document in found]
    weight = sum(weights.sum() for _, weights in found)
    total, grads = jax.tree.map(
        lambda *each: np.sum(np.float64(each), axis=0) / weight, *totals
    )
    return float(total), named_leaves(grads), named_leaves(params)


def make_engine(
    positions: str, kind: str, mesh: dict[str, int], **given: Any
) -> jaxpar.Engine:
    return jaxpar.initialize(
        model=make_decoder(make_config(positions)),
        loss_fn=decoder_loss,
        optimizer=optax.sgd(RATE),
        sample_batch=BATCHES[kind](),
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


CASES = [("packed", name, positions) for name in MESHES for positions in POSITIONS]
CASES += [("padded", "one device", "learned"), ("padded", "pipeline", "rotary")]
CASES += [("padded", "zero 3", "learned")]


@pytest.mark.parametrize(("kind", "name", "positions"), CASES)
def test_documents_of_a_batch_train_as_each_alone(kind: str, name: str, positions: str):
    loss, grads, before = oracle(positions, kind)
    engine = make_engine(positions, kind, **MESHES[name])
    metrics = engine.step(BATCHES[kind]())
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)
    after = named_leaves(jax.device_get(engine.state.params))
    assert after.keys() == grads.keys()
    for leaf, grad in grads.items():
        want = before[leaf].astype(np.float64) - RATE * grad
        error = np.linalg.norm(after[leaf] - want)
        assert error < 1e-6 * np.linalg.norm(want), leaf
        assert np.linalg.norm(before[leaf]) < 0.1 * np.linalg.norm(want), leaf
