"""jaxpar's engine as a user would call it: DEVICES ZERO as arguments."""

import sys
from pathlib import Path

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jaxpar
from benchmarks.contestants import protocol
from jaxpar.models import GPT, GPTConfig, gpt_loss


def main() -> None:
    """Serve steps."""
    devices, zero = int(sys.argv[1]), int(sys.argv[2])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    config = GPTConfig(
        vocab_size=protocol.VOCAB,
        seq_len=protocol.LENGTH,
        num_layers=protocol.LAYERS,
        num_heads=protocol.HEADS,
        width=protocol.WIDTH,
        # One loop over layers is faster where two devices share the cores.
        unroll=protocol.LAYERS if devices == 1 else 1,
    )
    batches = [
        {"tokens": np.array(protocol.tokens(step), np.int32)} for step in range(8)
    ]
    engine = jaxpar.initialize(
        model=lambda rngs: GPT(config, rngs=rngs),
        loss_fn=gpt_loss,
        optimizer=optax.adamw(protocol.LEARNING_RATE),
        sample_batch=batches[0],
        zero=zero,
    )
    engine.step(batches[0])
    protocol.serve(lambda step: float(engine.step(batches[step % 8])["loss"]))


main()
