"""jaxpar's engine as a user would call it: SHAPE DEVICES ZERO as arguments."""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jaxpar
from benchmarks.contestants import protocol
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder


def make_engine(
    shape: protocol.Shape, *, sample_batch: Any, zero: int = 0, mesh: Any = None
) -> jaxpar.Engine:
    """Make the engine that is measured."""
    on_gpu = shape.device == "gpu"
    num_devices = jax.device_count() if mesh is None else mesh.size
    config = DecoderConfig(
        vocab_size=shape.vocab,
        seq_len=shape.length,
        num_layers=shape.layers,
        num_heads=shape.heads,
        width=shape.width,
        # One loop over layers is faster where two CPU devices share the cores.
        unroll=shape.layers if num_devices == 1 else 1,
    )
    return jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(protocol.LEARNING_RATE),
        sample_batch=sample_batch,
        mesh=mesh,
        zero=zero,
        precision="bf16" if on_gpu else "fp32",
    )


def main() -> None:
    """Serve steps."""
    shape = protocol.SHAPES[sys.argv[1]]
    devices, zero = int(sys.argv[2]), int(sys.argv[3])
    if shape.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    batches = [
        {"tokens": np.array(protocol.tokens(shape, step), np.int32)}
        for step in range(8)
    ]
    engine = make_engine(shape, sample_batch=batches[0], zero=zero)
    float(engine.step(batches[0])["loss"])

    protocol.serve(lambda step: engine.step(batches[step % 8])["loss"])


if __name__ == "__main__":
    main()
