"""Megatron-LM's GPT of 2021, as a recipe to plan: `benchmarks/plan_megatron.py`.

As recipes/pretrain.py, but with what Megatron did then: scores of attention are written
to memory, every layer runs again, and the vocabulary is padded until it divides.
"""

import dataclasses

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import jaxpar
from jaxpar.models import decoder_config, decoder_loss, make_decoder


@dataclasses.dataclass(frozen=True)
class Config:
    """One row of Megatron's table."""

    model: str = "1.7b"
    """A preset of the table."""
    mesh: jaxpar.MeshShape = dataclasses.field(default_factory=jaxpar.MeshShape)
    """GPUs by axis."""
    accumulate: int = 1
    """Micro-batches a step."""
    zero: int = 0
    """ZeRO stage."""
    batch_size: int = 512
    """Rows of the global batch."""


def build(config: Config, mesh: Mesh) -> jaxpar.Engine:
    """Make the engine."""
    own = decoder_config(config.model)
    ways = mesh.shape["pipe"] * mesh.shape["tensor"]
    vocab_size = -(-own.vocab_size // ways) * ways
    model = dataclasses.replace(own, vocab_size=vocab_size, attention="xla")
    shape = (config.batch_size, model.seq_len + 1)
    return jaxpar.initialize(
        model=make_decoder(model),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-4),
        sample_batch={"tokens": jax.ShapeDtypeStruct(shape, np.int32)},
        mesh=mesh,
        zero=config.zero,
        precision="bf16",
        accumulate=config.accumulate,
    )


def tokens_per_step(config: Config) -> int:
    """Tokens that a step learns to predict."""
    return config.batch_size * decoder_config(config.model).seq_len
