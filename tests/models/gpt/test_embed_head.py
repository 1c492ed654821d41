"""What comes before and after a GPT's blocks: is it what NumPy computes?"""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models.gpt import embed_head
from jaxpar.models.gpt.config import GPTConfig
from jaxpar.models.layers import LayerNorm, RMSNorm

SMALL = {"vocab_size": 11, "seq_len": 6, "num_layers": 1, "num_heads": 2, "width": 8}
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 5))


def make_module(**fields: Any) -> types.SimpleNamespace:
    """What holds the parameters: any object with these names."""
    config, rngs = GPTConfig(**SMALL, **fields), nnx.Rngs(0, dropout=1)
    embedding, positions = embed_head.make_embeddings(config, rngs)
    dropout = embed_head.make_dropout(config, rngs)
    return types.SimpleNamespace(
        config=config, embedding=embedding, positions=positions, dropout=dropout
    )


def tables_of(module: Any) -> tuple[np.ndarray, np.ndarray]:
    tables = module.embedding.table[...], module.positions.table[...]
    return np.asarray(tables[0]), np.asarray(tables[1])


def test_positions_count_from_zero_where_none_are_given():
    module = make_module()
    tokens, positions = tables_of(module)
    got = embed_head.embed(module, jnp.asarray(TOKENS), None)
    np.testing.assert_array_equal(got, tokens[TOKENS] + positions[:5])


def test_positions_that_are_given_are_looked_up():
    module = make_module()
    tokens, positions = tables_of(module)
    where = np.array([[0, 1, 0, 1, 2], [5, 4, 3, 2, 1]])
    got = embed_head.embed(module, jnp.asarray(TOKENS), jnp.asarray(where))
    np.testing.assert_array_equal(got, tokens[TOKENS] + positions[where])


def test_rotary_positions_add_nothing_and_have_no_table():
    module = make_module(positions="rotary")
    assert module.positions is None
    got = embed_head.embed(module, jnp.zeros((1, 9), int), None)
    table = np.asarray(module.embedding.table[...])
    np.testing.assert_array_equal(got, np.tile(table[0], (1, 9, 1)))


def test_row_longer_than_the_learned_positions_raises():
    message = r"a row of 7 tokens is longer than the 6 learned positions"
    with pytest.raises(ValueError, match=message):
        embed_head.embed(make_module(), jnp.zeros((1, 7), int), None)


def test_embedding_is_dropped_with_the_rest_scaled():
    module = make_module(dropout=0.5)
    tokens, positions = tables_of(module)
    right = tokens[TOKENS] + positions[:5]
    got = np.asarray(embed_head.embed(module, jnp.asarray(TOKENS), None))
    is_kept = got != 0
    assert 0 < is_kept.mean() < 1
    np.testing.assert_allclose(got, np.where(is_kept, 2 * right, 0), rtol=1e-6)


def test_dropout_of_rate_zero_is_none():
    assert make_module().dropout is None


@pytest.mark.parametrize("bias", [False, True])
def test_norm_is_the_one_that_the_config_names(bias: bool):
    norm = embed_head.make_norm(GPTConfig(**SMALL, bias=bias))
    assert isinstance(norm, LayerNorm)
    assert (norm.bias is not None) == bias
    rms = embed_head.make_norm(GPTConfig(**SMALL, bias=bias, norm="rmsnorm"))
    assert isinstance(rms, RMSNorm)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_logits_are_the_product_in_fp32(sequence_parallel: bool):
    rng = np.random.default_rng(1)
    hidden, kernel = rng.normal(size=(2, 5, 8)), rng.normal(size=(8, 11))
    halves = [jnp.asarray(x, jnp.bfloat16) for x in (hidden, kernel)]
    config = GPTConfig(**SMALL, sequence_parallel=sequence_parallel)
    got = embed_head.logits_of(*halves, config)
    assert got.dtype == jnp.float32
    right = np.matmul(*(np.asarray(x, np.float64) for x in halves))
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sequence_parallel", "spec"), [(True, P("data", "tensor")), (False, P("data"))]
)
def test_residual_is_split_over_tokens_where_asked_and_gathered_after_a_norm(
    sequence_parallel: bool, spec: P
):
    config = GPTConfig(**SMALL, sequence_parallel=sequence_parallel)
    mesh = make_mesh(MeshShape(data=2, tensor=2), jax.devices()[:4])

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (
            embed_head.constrain_residual(x, config),
            embed_head.gather_tokens(x + 1, config),
        )

    with jax.set_mesh(mesh):
        residual, gathered = jax.jit(both)(jnp.ones((4, 6, 8)))
    assert residual.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 3)
    whole = jax.NamedSharding(mesh, P("data"))
    assert gathered.sharding.is_equivalent_to(whole, 3)
    np.testing.assert_array_equal(gathered, np.full((4, 6, 8), 2))
