"""Is a model told that computes in fp32 where half precision was asked for?"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from benchmarks.contestants.qwen3 import Qwen3, Qwen3Config
from jaxpar.losses import next_token_loss

CONFIG = Qwen3Config(
    vocab=64, layers=2, width=32, heads=2, kv_heads=1, head=16, hidden=48
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
    return [line for line in str(engine.explain()).splitlines() if REMARK in line]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_embedding_that_keeps_its_dtype_is_told(precision):
    """flax's own nnx.Embed without a dtype: all that follows is in fp32."""
    tokens = {"tokens": np.zeros((8, 17), np.int32)}
    lines = remark(
        lambda rngs: Qwen3(CONFIG, rngs=rngs), next_token_loss, tokens, precision
    )
    (line,) = lines
    assert "100%" in line


def test_layers_in_a_loop_count_each_time():
    """The head alone would be half; of three layers and a head it is a quarter."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.stack = nnx.Param(jnp.zeros((3, 8, 8)))
            self.head = nnx.Param(jnp.zeros((8, 8)))

        def __call__(self, x, head_dtype, layer_dtype):
            def layer(x, kernel):
                return (x @ kernel.astype(layer_dtype)).astype(x.dtype), None

            x, _ = nnx.scan(layer, in_axes=(nnx.Carry, 0))(
                x.astype(layer_dtype), self.stack[...]
            )
            return x.astype(head_dtype) @ self.head[...].astype(head_dtype)

    def loss(*dtypes):
        return lambda model, batch: model(batch["x"], *dtypes).mean()

    batch = {"x": np.ones((8, 8), np.float32)}
    assert not remark(Model, loss(jnp.float32, jnp.bfloat16), batch, "bf16")
    (line,) = remark(Model, loss(jnp.bfloat16, jnp.float32), batch, "bf16")
    assert "75%" in line


def test_right_models_are_told_nothing():
    tokens = {"tokens": np.zeros((8, 17), np.int32)}
    in_bf16 = dataclasses.replace(CONFIG, dtype=jnp.bfloat16)
    for config, precision in ((in_bf16, "bf16"), (CONFIG, "fp32")):
        model = functools.partial(Qwen3, config)
        assert not remark(
            lambda rngs, make=model: make(rngs=rngs), next_token_loss, tokens, precision
        )
