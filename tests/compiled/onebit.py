"""What is compiled: a GPT's step with 1-bit Adam, for 64 H200s."""

import dataclasses
import math

import jax
import jax.numpy as jnp

import jaxpar
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.optim import onebit_adam
from jaxpar.planner.targets import parse_target
from jaxpar.tree import num_elements


@dataclasses.dataclass(frozen=True)
class OneBitStep:
    """A compiled step.

    Attributes:
      psi: parameters of a tensor shard.
      exchanged: bytes of the all-to-all over data.
      carried: bytes on a device that the reduction carries.
    """

    psi: int
    exchanged: int
    carried: int


def compile_onebit(tensor: int, zero: int) -> OneBitStep:
    """Compile the step, and hold it to its closed form."""
    devices = parse_target("h200:8x8").devices()
    config = DecoderConfig(
        num_layers=4,
        width=512,
        num_heads=8,
        vocab_size=1024,
        seq_len=128,
        remat="full",
    )
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=onebit_adam(1e-3, 100),
        sample_batch={"tokens": jax.ShapeDtypeStruct((64, 129), jnp.int32)},
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(tensor=tensor), devices),
        zero=zero,
        precision="bf16",
    )
    engine.verify()
    carry = engine.placement.packed.carried["reduction"]
    return OneBitStep(
        psi=num_elements(engine.placement.abstract.params) // tensor,
        exchanged=engine.budget().communicated["data"]["all-to-all"],
        carried=sum(
            x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
            for x in jax.tree.leaves(carry)
        ),
    )
