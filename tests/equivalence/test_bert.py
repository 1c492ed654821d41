"""Does a BERT train on any mesh as on one device, for each of its tasks?

Rows of unequal weight: some have more masked words than others, some no label, and all
have another padding. SGD with momentum, as a key's bias has no gradient but rounding
noise. Losses to 1e-6 and parameters to 1e-5, relative, over three steps; the key's bias
stays near its zeros.
"""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.models import BertConfig, make_bert, make_bert_loss, pretraining_batch
from tests.equivalence import problems

SHAPE = {
    "vocab_size": 64,
    "seq_len": 16,
    "num_layers": 2,
    "num_heads": 4,
    "width": 32,
    "num_labels": 4,
    "norm_epsilon": 1e-6,
}
ROWS, LENGTH, STEPS = 8, 16, 3
MODEL = {"remat", "dropout", "sequence_parallel"}
PACKED = {"packed": True}
THREE_D = {"data": 2, "pipe": 2, "tensor": 2, "accumulate": 2, "remat": "full"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pretraining-zero3-tensor2": ("pretraining", {"zero": 3, "data": 2, "tensor": 2}),
    "pretraining-accumulate": ("pretraining", {"zero": 2, "data": 4, "accumulate": 2}),
    "pretraining-pipe2-tensor2": ("pretraining", THREE_D),
    "pretraining-dropout-pipe2": (
        "pretraining",
        {"data": 2, "pipe": 2, "accumulate": 2, "dropout": 0.2},
    ),
    "masked-sequence-dropout": (
        "masked",
        {"zero": 1, "data": 2, "tensor": 2, "sequence_parallel": True, "dropout": 0.2},
    ),
    "masked-packed-zero3": ("masked", {"zero": 3, "data": 4, **PACKED}),
    "masked-packed-pipe2": ("masked", {**THREE_D, **PACKED}),
    "masked-sequence-packed": (
        "masked",
        {"zero": 3, "data": 2, "tensor": 2, "sequence_parallel": True, **PACKED},
    ),
    "masked-zero0-tensor4": ("masked", {"zero": 0, "data": 1, "tensor": 4}),
    "sequence-zero3-tensor2": (
        "sequence",
        {"zero": 3, "data": 2, "tensor": 2, "dropout": 0.2},
    ),
    "sequence-pipe2-sequence-parallel": (
        "sequence",
        {"data": 2, "pipe": 2, "tensor": 2, "accumulate": 2, "sequence_parallel": True},
    ),
    "tokens-zero2": ("tokens", {"zero": 2, "data": 4, "dropout": 0.2}),
    "tokens-zero1-pipe2": (
        "tokens",
        {"zero": 1, "data": 2, "pipe": 2, "accumulate": 2},
    ),
}
QUICK = ("pretraining-pipe2-tensor2",)


def batches(task: str, *, packed: bool) -> list[dict[str, Any]]:
    """Rows of several lengths, with labels in unequal numbers."""
    rng = np.random.default_rng(0)

    def one() -> dict[str, Any]:
        lengths = rng.integers(6, LENGTH + 1, (ROWS, 1))
        place = np.arange(LENGTH)
        is_real, second = place < lengths, place >= lengths // 2
        chosen = rng.random((ROWS, LENGTH)) < np.linspace(0.6, 0.1, ROWS)[:, None]
        classes = SHAPE["num_labels" if task == "tokens" else "vocab_size"]
        labels = rng.integers(0, classes, (ROWS, LENGTH))
        batch: dict[str, Any] = {
            "tokens": rng.integers(0, 64, (ROWS, LENGTH)),
            "labels": np.where(chosen & is_real, labels, -100),
            "token_types": second * 1,
            "next_sentence": rng.integers(-1, 2, ROWS),
            "label": rng.integers(-1, SHAPE["num_labels"], ROWS),
        }
        if packed:
            batch["segment_ids"] = np.where(is_real, 1 + second, 0)
            batch["positions"] = np.where(second, place - lengths // 2, place)
        else:
            batch["attention_mask"] = is_real * 1
        batch = {name: array.astype(np.int32) for name, array in batch.items()}
        return pretraining_batch(batch) if task == "pretraining" else batch

    return [one() for _ in range(STEPS)]


def train(
    task: str, *, data: int = 1, pipe: int = 1, tensor: int = 1, **given: Any
) -> tuple[list[float], Any]:
    steps = batches(task, packed=given.pop("packed", False))
    own = {name: given.pop(name) for name in MODEL & given.keys()}
    config = BertConfig(**SHAPE, task=task, **own)
    shape = jaxpar.MeshShape(data=data, pipe=pipe, tensor=tensor)
    engine = jaxpar.initialize(
        model=make_bert(config),
        loss_fn=make_bert_loss(config),
        optimizer=optax.sgd(0.3, momentum=0.9),
        sample_batch=steps[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
        clip_norm=1.0,
        check_loss=False,
        **given,
    )
    losses = [float(engine.step(batch)["loss"]) for batch in steps]
    return losses, jax.device_get(engine.state.params)


@functools.cache
def on_one_device(task: str, accumulate: int, dropout: float, packed: bool) -> Any:
    return train(task, accumulate=accumulate, dropout=dropout, packed=packed)


def without_key_bias(params: Any) -> tuple[Any, np.ndarray]:
    params = jax.tree.map(lambda x: x, params)
    return params, params["blocks"]["attention"]["key"].pop("bias")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough)
        for name in CASES
    ],
)
def test_any_mesh_trains_as_one_device_does(name: str) -> None:
    task, case = CASES[name]
    usual = {"accumulate": 1, "dropout": 0.0, "packed": False}
    right = on_one_device(task, *(case.get(k, x) for k, x in usual.items()))
    losses, params = train(task, **case)
    assert losses == pytest.approx(right[0], rel=1e-6)
    (own, bias), (other, _) = map(without_key_bias, (params, right[1]))
    assert problems.distance(own, other) <= 1e-5
    assert np.abs(bias).max() < 1e-6


@pytest.mark.thorough
def test_two_means_are_one_loss_that_the_engine_accepts() -> None:
    """By the check that a loss does not depend on how rows are split."""
    config = BertConfig(**{**SHAPE, "num_layers": 1}, task="pretraining")
    batch = batches("pretraining", packed=False)[0]
    engine = jaxpar.initialize(
        model=make_bert(config),
        loss_fn=make_bert_loss(config),
        optimizer=optax.sgd(0.3),
        sample_batch=batch,
        mesh=jaxpar.MeshShape(data=2),
        devices=jax.devices()[:2],
        accumulate=2,
        check_loss=True,
    )
    found = engine.step(batch)
    means = float(found["word_loss"]) + float(found["sentence_loss"])
    assert float(found["loss"]) == pytest.approx(means, rel=1e-6)
