"""What is compiled: a GPT's step whose blocks' inputs are stored on the host, or not.

Runs in the process that has the compilers; arguments and results travel as pickles.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import optax

import jaxpar
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.planner.targets import parse_target

LAYERS, WIDTH, LENGTH, ROWS = 8, 512, 1024, 8

INPUTS = LAYERS * ROWS * LENGTH * WIDTH * 2
"""Bytes of all blocks' inputs, of a data shard."""


@dataclasses.dataclass(frozen=True)
class ActivationStep:
    """A compiled step.

    Attributes:
      temporaries: bytes on a device.
      on_host: bytes of temporaries in the host's memory, for a device.
      writes: copies of an input to the host that are started and awaited apart.
    """

    temporaries: int
    on_host: int
    writes: int


def compile_step(target: str, zero: int, tensor: int, remat: str) -> ActivationStep:
    """Compile the step for a target's devices."""
    devices = parse_target(target).devices()
    config = DecoderConfig(
        num_layers=LAYERS,
        num_heads=4,
        width=WIDTH,
        seq_len=LENGTH,
        vocab_size=512,
        remat=remat,
    )
    shape = ROWS * len(devices) // tensor, LENGTH + 1
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch={"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)},
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(tensor=tensor), devices),
        zero=zero,
        precision="bf16",
    )
    compiled = engine.lower().compile()
    stats, text = compiled.memory_analysis(), compiled.as_text()
    return ActivationStep(
        temporaries=stats.temp_size_in_bytes,
        on_host=stats.host_temp_size_in_bytes,
        writes=len(re.findall(r"dynamic-update-slice-start\S* = [^\n]*S\(5\)", text)),
    )
