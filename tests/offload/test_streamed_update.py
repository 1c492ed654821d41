"""Is the state where it was said, and are its pieces what computes?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.offload.streamed_update import StreamedUpdate
from jaxpar.tree import named_leaves
from tests.equivalence.perceptron import make_engine

PIECE = jaxpar.Offload(piece_mb=0.0004)


def update_of(
    optimizer: Any, precision: str = "fp32", **options: Any
) -> tuple[StreamedUpdate, jaxpar.Engine]:
    engine = make_engine(
        optimizer, 4, 2, 1, precision=precision, offload=PIECE, **options
    )
    update = engine.placement.update
    assert isinstance(update, StreamedUpdate)
    return update, engine


def test_masters_and_moments_are_pinned_and_counts_are_not() -> None:
    update, engine = update_of(optax.adam(0.1))
    placed = named_leaves(engine.placement.shardings.opt_state)
    kinds = {name: place.memory_kind for name, place in placed.items()}
    assert kinds.pop("0/count") == "device"
    assert set(kinds.values()) == {"pinned_host"}
    assert set(update.host_leaves) == set(named_leaves(engine.state.params))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_come_in_the_compute_dtype(precision: str) -> None:
    update, engine = update_of(optax.adam(0.1), precision)
    found = jax.jit(update.compute_params)(engine._packed.params)
    for name, leaf in named_leaves(found).items():
        right = named_leaves(engine.state.params)[name]
        assert leaf.dtype == jnp.dtype(
            {"fp32": "float32", "bf16": "bfloat16"}[precision]
        )
        assert leaf.sharding.memory_kind == "device"
        np.testing.assert_array_equal(leaf, np.asarray(right).astype(leaf.dtype))


def test_a_leaf_is_streamed_in_the_pieces_of_its_shard() -> None:
    update, _ = update_of(optax.adam(0.1))
    chunks = update._chunks(update.host_leaves["up/kernel"])
    # 16 x 64, its columns split by tensor and data: 16 x 8, in pieces of 100 elements.
    assert (chunks.shape, chunks.num) == ((4, 32), 2)


def test_metrics_of_the_optimizer_are_reported() -> None:
    optimizer = optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.5, 0.0, 4)
    )
    _, engine = update_of(optimizer)
    batch = {"x": np.ones((32, 16), np.float32), "y": np.ones((32, 8), np.float32)}
    rates = [float(engine.step(batch)["learning_rate"]) for _ in range(3)]
    assert rates == [0.5, 0.375, 0.25]
