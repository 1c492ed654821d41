"""Does a T5 train on any mesh as on one device, its tables of positions included?

Padded and packed rows, whose weights differ by row and so by shard; with dropout, whose
random numbers do not depend on the mesh. SGD with momentum; losses to 1e-6 and
parameters to 1e-5, relative, over three steps.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.models import T5Config, make_t5, t5_loss
from tests.equivalence import problems

CONFIG = T5Config(
    vocab_size=64,
    num_layers=2,
    num_decoder_layers=4,
    num_heads=4,
    width=32,
    head_width=4,
    mlp_width=48,
    num_buckets=8,
    max_distance=10,
)
ROWS, READ, WRITTEN, STEPS = 8, 16, 12, 3
OF_CONFIG = {field.name for field in dataclasses.fields(T5Config)}
DROPOUT = {"dropout": 0.2}
FIRST = {"activation": "relu", "tied_embedding": True}
PIPE = {"data": 2, "pipe": 2, "tensor": 2, "accumulate": 2}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "packed-pipe2-tensor2": ("packed", {}, {**PIPE, "zero": 1, "remat": "full"}),
    "packed-zero3-tensor2": (
        "packed",
        {},
        {"zero": 3, "data": 2, "tensor": 2, "accumulate": 2},
    ),
    "padded-pipe2-drops": ("padded", DROPOUT, {**PIPE, "zero": 1, "remat": "full"}),
    "packed-zero3-drops": ("packed", DROPOUT, {"zero": 3, "data": 2, "tensor": 2}),
    "padded-zero0": ("padded", {}, {"zero": 0, "data": 4}),
    "padded-zero1-tensor4": ("padded", {}, {"zero": 1, "data": 2, "tensor": 4}),
    "padded-zero2": ("padded", DROPOUT, {"zero": 2, "data": 4, "accumulate": 2}),
    "padded-zero3-ahead-halves": (
        "padded",
        {},
        {"zero": 3, "data": 2, "prefetch": True, "two_batch_overlap": True},
    ),
    "packed-pipe2-zero3": ("packed", {}, {**PIPE, "zero": 3}),
    "packed-pipe2-gpipe": (
        "packed",
        {},
        {**PIPE, "zero": 0, "schedule": "gpipe", "remat": "dots"},
    ),
    "packed-sequence": (
        "packed",
        DROPOUT,
        {"zero": 1, "data": 2, "tensor": 2, "sequence_parallel": True},
    ),
    "padded-sequence-pipe2": (
        "padded",
        {},
        {**PIPE, "zero": 2, "sequence_parallel": True},
    ),
    "first-pipe2-tensor2": ("padded", FIRST, {**PIPE, "zero": 2}),
    "first-sequence": (
        "packed",
        FIRST,
        {"zero": 3, "data": 2, "tensor": 2, "sequence_parallel": True},
    ),
    "xla-zero3-tensor2": (
        "packed",
        {"attention": "xla"},
        {"zero": 3, "data": 2, "tensor": 2},
    ),
}
QUICK = ("packed-pipe2-tensor2",)
SLOW = {
    "packed-pipe2-gpipe",
    "packed-pipe2-zero3",
    "padded-pipe2-drops",
    "padded-sequence-pipe2",
    "padded-zero2",
}
"""Twenty seconds and more each."""


def batches(kind: str) -> list[dict[str, np.ndarray]]:
    """Rows of which the later ones have ever less to learn."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        inputs, labels = (
            rng.integers(1, CONFIG.vocab_size, (ROWS, n), np.int32)
            for n in (READ, WRITTEN)
        )
        ends = [np.linspace(n, 3, ROWS).astype(int)[:, None] for n in (READ, WRITTEN)]
        read, written = np.arange(READ) < ends[0], np.arange(WRITTEN) < ends[1]
        batch = {"inputs": inputs, "labels": labels}
        if kind == "padded":
            batch["labels"] = np.where(written, labels, -100)
            batch["attention_mask"] = read.astype(np.int32)
        else:
            halves = [1 + (np.arange(n) > n // 3) for n in (READ, WRITTEN)]
            batch["segment_ids"] = (read * halves[0]).astype(np.int32)
            batch["label_segment_ids"] = (written * halves[1]).astype(np.int32)
        found.append(batch)
    return found


def train(
    kind: str, *, data: int = 1, pipe: int = 1, tensor: int = 1, **given: Any
) -> tuple[list[float], Any]:
    own = {name: x for name, x in given.items() if name in OF_CONFIG}
    rest = {name: x for name, x in given.items() if name not in OF_CONFIG}
    shape = jaxpar.MeshShape(data=data, pipe=pipe, tensor=tensor)
    engine = jaxpar.initialize(
        model=make_t5(dataclasses.replace(CONFIG, **own)),
        loss_fn=t5_loss,
        optimizer=optax.sgd(0.3, momentum=0.9),
        sample_batch=batches(kind)[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
        clip_norm=1.0,
        check_loss=False,
        **rest,
    )
    losses = [float(engine.step(batch)["loss"]) for batch in batches(kind)]
    return losses, jax.device_get(engine.state.params)


@functools.cache
def on_one_device(kind: str, accumulate: int, given: tuple) -> Any:
    return train(kind, accumulate=accumulate, **dict(given))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=()
            if name in QUICK
            else pytest.mark.slow
            if name in SLOW
            else pytest.mark.thorough,
        )
        for name in CASES
    ],
)
def test_any_mesh_trains_as_one_device_does(name: str) -> None:
    kind, model, how = CASES[name]
    one = on_one_device(kind, how.get("accumulate", 1), tuple(model.items()))
    losses, params = train(kind, **model, **how)
    assert losses == pytest.approx(one[0], rel=1e-6)
    assert problems.distance(params, one[1]) <= 1e-5
