"""Does the check of a loss need no more memory than the step?"""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.models import DecoderConfig, make_decoder

pytestmark = pytest.mark.usefixtures("checked_losses")

RNG = np.random.default_rng(0)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_check_needs_no_more_memory_than_the_step(zero: int) -> None:
    config = DecoderConfig(
        vocab_size=256, seq_len=64, num_layers=4, num_heads=4, width=128
    )
    tokens = RNG.integers(0, 256, size=(32, 64)).astype(np.int32)

    def loss_fn(model: Any, batch: dict) -> jax.Array:
        logits = model(batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(logits, batch["tokens"]).mean()

    engine = jaxpar.initialize(
        loss_fn=loss_fn,
        mesh=jaxpar.MeshShape(data=8),
        model=make_decoder(config),
        sample_batch={"tokens": tokens},
        optimizer=optax.adamw(1e-3),
        zero=zero,
    )
    check: Any = engine.loss().program.loss_check
    kept = engine._packed
    placed = engine.batch_spec.put({"tokens": tokens})
    given = (kept.params, kept.model_state, placed, kept.step, kept.key, 0.1)
    compared = check._compare.lower(*given).compile().memory_analysis()
    step = engine.lower().compile().memory_analysis()
    opt_state = sum(x.nbytes for x in jax.tree.leaves(engine.state.opt_state))
    held = opt_state / (1 if zero == 0 else 8)  # While the check runs as well.
    assert total_of(compared) + held <= total_of(step)


def total_of(memory: Any) -> int:
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes
