"""What is compiled: a step of one large MLP, whole or in tiles.

Runs in the process that has the compilers; arguments and results travel as pickles.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxpar
from jaxpar.models.mlp import MLP
from jaxpar.models.tiled import TiledMLP
from jaxpar.planner.targets import parse_target

WIDTH, HIDDEN, TOKENS = 2048, 16_384, 256

WEIGHTS = 2 * 2 * WIDTH * HIDDEN
"""Bytes of both kernels in bf16."""


def compile_mlp(target: str, tiles: int) -> int:
    """Bytes of temporaries on a device at ZeRO 3; tiles of 0 for a plain MLP."""
    devices = parse_target(target).devices()

    def model(rngs: nnx.Rngs) -> nnx.Module:
        how = {"activation": "gelu", "bias": True, "output_stddev": 0.02, "rngs": rngs}
        if not tiles:
            return MLP(WIDTH, HIDDEN, **how)
        return TiledMLP(WIDTH, HIDDEN, tiles=tiles, **how)

    def loss_fn(model: nnx.Module, batch: dict) -> jax.Array:
        return jnp.mean(model(batch["x"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    shape = len(devices), TOKENS, WIDTH
    engine = jaxpar.initialize(
        model=model,
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-3),
        sample_batch={"x": jax.ShapeDtypeStruct(shape, jnp.float32)},
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(), devices),
        zero=3,
        precision="bf16",
    )
    return engine.lower().compile().memory_analysis().temp_size_in_bytes
