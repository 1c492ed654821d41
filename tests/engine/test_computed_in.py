"""Is a model told that computes in fp32 where half precision was asked for?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from benchmarks.contestants.qwen3 import Qwen3, Qwen3Config
from jaxpar.losses import next_token_loss

CONFIG = Qwen3Config(
    vocab_size=64, layers=1, width=32, heads=2, kv_heads=1, head=16, hidden=48
)
REMARK = "of the matmuls' FLOPs are in float32"


def remark(model, loss, batch, precision):
    engine = jaxpar.initialize(
        model=model,
        loss_fn=loss,
        optimizer=optax.sgd(0.1),
        sample_batch=batch,
        precision=precision,
    )
    lines = [line for line in engine.notes if REMARK in line]  # A plan has them too.
    assert str(engine.explain()).count(REMARK) == len(lines)
    return lines


def qwen3_remark(config, precision):
    tokens = {"tokens": np.zeros((8, 17), np.int32)}
    return remark(
        lambda rngs: Qwen3(config, rngs=rngs), next_token_loss, tokens, precision
    )


@pytest.mark.parametrize(
    "precision", ["bf16", pytest.param("fp16", marks=pytest.mark.thorough)]
)
def test_an_embedding_that_keeps_its_dtype_is_told(precision):
    """flax's own nnx.Embed without a dtype: all that follows is in fp32."""
    (line,) = qwen3_remark(CONFIG, precision)
    assert "100%" in line


def test_right_models_are_told_nothing():
    in_bf16 = dataclasses.replace(CONFIG, dtype=jnp.bfloat16)
    assert not qwen3_remark(in_bf16, "bf16")
    assert not qwen3_remark(CONFIG, "fp32")


class InTwoDtypes(nnx.Module):
    """Three layers in a loop and a head, each with a dtype of its own."""

    def __init__(self, rngs):
        self.stack = nnx.Param(jnp.zeros((3, 8, 8)))
        self.head = nnx.Param(jnp.zeros((8, 8)))

    def __call__(self, x, layer_dtype, head_dtype):
        def layer(x, kernel):
            return x @ kernel.astype(layer_dtype), None

        x, _ = jax.lax.scan(layer, x.astype(layer_dtype), self.stack[...])
        return x.astype(head_dtype) @ self.head[...].astype(head_dtype)


@pytest.mark.parametrize(
    ("dtypes", "share"),
    [((jnp.bfloat16, jnp.float32), None), ((jnp.float32, jnp.bfloat16), "75%")],
)
def test_layers_in_a_loop_count_each_time(dtypes, share):
    """Counted once, either part would be half of the FLOPs, and be told."""
    batch = {"x": np.ones((8, 8), np.float32)}
    lines = remark(InTwoDtypes, lambda m, b: m(b["x"], *dtypes).mean(), batch, "bf16")
    assert len(lines) == (share is not None)
    assert not share or share in lines[0]
