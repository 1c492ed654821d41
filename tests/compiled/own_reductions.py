"""What is compiled for 64 H200s: a GPT's step whose gradients go in few bits."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpar
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.optim import QuantizedReduction, WithReduction, ZeroPlusPlus, onebit_adam
from jaxpar.planner.targets import parse_target
from jaxpar.tree import num_elements


@dataclasses.dataclass(frozen=True)
class OwnReductionStep:
    """A compiled step.

    Attributes:
      psi: parameters of a tensor shard.
      exchanged: bytes of the all-to-all over data.
      carried: bytes on a device that the reduction carries.
    """

    psi: int
    exchanged: int
    carried: int


def compile_onebit(tensor: int, zero: int) -> OwnReductionStep:
    """Compile a step of 1-bit Adam, and hold it to its closed form."""
    return _compiled(onebit_adam(1e-3, 100), tensor, zero)


def compile_quantized(bits: int, tensor: int, zero: int) -> OwnReductionStep:
    """The same of AdamW with quantised gradients."""
    optimizer = WithReduction(optax.adamw(1e-3), QuantizedReduction(bits))
    return _compiled(optimizer, tensor, zero)


def compile_plus(plus: ZeroPlusPlus | None) -> dict[str, dict[str, int]]:
    """What AdamW's step sends at ZeRO 3, by axis and kind, held to its closed form.

    Args:
      plus: on 8 replicas, a host each; None for plain ZeRO over all 64 devices.
    """
    shape = jaxpar.MeshShape(replica=8 if plus else 1, data=8 if plus else 64)
    engine = _engine(optax.adamw(1e-3), shape, plus or 3)
    return dict(engine.verify().communicated)


def _compiled(optimizer: Any, tensor: int, zero: int) -> OwnReductionStep:
    engine = _engine(optimizer, jaxpar.MeshShape(tensor=tensor), zero)
    found = engine.verify()
    carry = engine.placement.packed.carried["reduction"]
    return OwnReductionStep(
        psi=num_elements(engine.placement.abstract.params) // tensor,
        exchanged=found.communicated["data"]["all-to-all"],
        carried=sum(
            x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
            for x in jax.tree.leaves(carry)
        ),
    )


def _engine(
    optimizer: Any, shape: jaxpar.MeshShape, zero: int | ZeroPlusPlus
) -> jaxpar.Engine:
    devices = parse_target("h200:8x8").devices()
    config = DecoderConfig(
        num_layers=4,
        width=512,
        num_heads=8,
        vocab_size=1024,
        seq_len=128,
        remat="full",
    )
    return jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optimizer,
        sample_batch={"tokens": jax.ShapeDtypeStruct((64, 129), jnp.int32)},
        mesh=jaxpar.make_mesh(shape, devices),
        zero=zero,
        precision="bf16",
    )
