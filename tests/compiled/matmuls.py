"""Programs for an H200 that is not here, for test_matmul_flops.py."""

import collections

import jax
import jax.numpy as jnp
import optax

import jaxpar
from benchmarks.gpu.roofline import kernels_of
from jaxpar.compiled.hlo import parse
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.planner.absent_devices import gpu_devices

LAYERS, WIDTH, VOCAB, ROWS, LENGTH = 2, 256, 1280, 4, 256


def flops_by_category() -> dict[str, int]:
    """FLOPs of a small GPT's training step, by what kernels are for."""
    config = DecoderConfig(
        vocab_size=VOCAB,
        seq_len=LENGTH,
        num_layers=LAYERS,
        num_heads=4,
        width=WIDTH,
        unroll=LAYERS,
    )
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch={"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH + 1), jnp.int32)},
        mesh=make_mesh(MeshShape(), gpu_devices("h200", 1, 1)),
        precision="bf16",
    )
    text = engine.lower().compile().as_text() or ""
    found: collections.Counter[str] = collections.Counter()
    for kernel in kernels_of(parse(text), VOCAB).values():
        found[kernel.category] += int(kernel.flops)
    return dict(found)
