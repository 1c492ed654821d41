from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models.layers import (
    Embedding,
    Linear,
    add_to_rows,
    named_param,
    project_to_logits,
)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_named_param_needs_no_mesh_and_keeps_names():
    param = named_param(jnp.ones((2, 3)), ("embed", None))
    assert param.get_metadata("out_sharding") == ("embed", None)


def test_named_param_wrong_number_of_names_raises():
    with pytest.raises(
        ValueError, match=r"names=\('embed',\) has 1 entries for an array of 2 dims"
    ):
        named_param(jnp.ones((2, 3)), ("embed",))


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("dims", [(5,), (2, 5), (2, 3, 5)])
def test_dense_is_a_product_and_a_bias(flatten: bool, dims: tuple[int, ...]):
    dense: Any = Linear((5, 7), ("embed", "mlp"), flatten=flatten, rngs=nnx.Rngs(0))
    dense.bias[...] = jnp.asarray(normal(7, seed=1))
    x = normal(*dims)
    want = x @ np.asarray(dense.kernel[...]) + normal(7, seed=1)
    np.testing.assert_allclose(dense(jnp.asarray(x)), want, rtol=1e-5, atol=1e-6)


def test_dense_flatten_changes_no_gradient():
    def grads(flatten: bool) -> list[jax.Array]:
        dense = Linear((5, 7), ("embed", "mlp"), flatten=flatten, rngs=nnx.Rngs(0))
        graphdef, state = nnx.split(dense)
        x = jnp.asarray(normal(2, 3, 5))

        def loss(state: nnx.State, x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(nnx.merge(graphdef, state)(x)))

        return jax.tree.leaves(jax.grad(loss, argnums=(0, 1))(state, x))

    for flat, whole in zip(grads(True), grads(False), strict=True):
        np.testing.assert_allclose(flat, whole, rtol=1e-5, atol=1e-6)


def test_dense_bias_takes_the_output_name():
    dense: Any = Linear((5, 7), ("embed", "mlp"), rngs=nnx.Rngs(0))
    assert dense.bias.get_metadata("out_sharding") == ("mlp",)
    assert Linear((5, 7), ("embed", "mlp"), bias=False, rngs=nnx.Rngs(0)).bias is None


def test_dense_kernel_has_its_standard_deviation():
    dense = Linear((100, 100), (None, None), stddev=0.3, rngs=nnx.Rngs(0))
    assert float(dense.kernel[...].std()) == pytest.approx(0.3, rel=0.02)


def test_embedding_has_its_standard_deviation():
    embedding = Embedding((100, 100), (None, None), stddev=0.3, rngs=nnx.Rngs(0))
    assert float(embedding.table[...].std()) == pytest.approx(0.3, rel=0.05)


def test_embedding_looks_rows_up():
    embedding = Embedding((9, 4), ("vocab", "embed"), rngs=nnx.Rngs(0))
    tokens = np.array([[0, 8, 3], [3, 1, 0]])
    want = np.asarray(embedding.table[...])[tokens]
    np.testing.assert_array_equal(embedding(jnp.asarray(tokens)), want)


def test_embedding_of_a_token_beyond_the_table_is_nan():
    embedding = Embedding((9, 4), ("vocab", "embed"), rngs=nnx.Rngs(0))
    x = embedding(jnp.array([[8, 9]]))
    assert not jnp.isnan(x[0, 0]).any()
    assert jnp.isnan(x[0, 1]).all()


def test_logits_of_half_precision_are_fp32_sums():
    x = jnp.asarray(normal(2, 3, 64), jnp.bfloat16)
    kernel = jnp.asarray(normal(64, 11, seed=1), jnp.bfloat16)
    logits = project_to_logits(x, kernel)
    want = np.asarray(x, np.float32) @ np.asarray(kernel, np.float32)
    assert logits.dtype == jnp.float32
    # Rounding the result to bf16 would be off by up to 4e-3 of it.
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-4)


def test_logits_of_half_precision_have_gradients_close_to_fp32():
    x = jnp.asarray(normal(2, 3, 64), jnp.bfloat16)
    kernel = jnp.asarray(normal(64, 11, seed=1), jnp.bfloat16)

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.softmax(project_to_logits(x, kernel))[..., 0])

    grads = jax.grad(loss, argnums=(0, 1))(x, kernel)
    want = jax.grad(loss, argnums=(0, 1))(x.astype("float32"), kernel.astype("float32"))
    for grad, expected in zip(grads, want, strict=True):
        assert grad.dtype == jnp.bfloat16
        error = jnp.linalg.norm(grad.astype(jnp.float32) - expected)
        assert error < 0.01 * jnp.linalg.norm(expected)


def test_logits_of_half_precision_run_their_backward_products_in_it():
    x, kernel = jnp.ones((2, 3, 8), jnp.bfloat16), jnp.ones((8, 5), jnp.bfloat16)
    _, vjp = jax.vjp(project_to_logits, x, kernel)
    jaxpr = jax.make_jaxpr(vjp)(jnp.ones((2, 3, 5), jnp.float32))
    products = [line for line in str(jaxpr).splitlines() if "= dot_general" in line]
    assert len(products) == 2
    assert all(":bf16" in line for line in products)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_added_to_rows_has_the_sum_of_their_gradients(dtype: Any):
    x, y = jnp.asarray(normal(6, 5, 4), dtype), jnp.asarray(normal(5, 4), dtype)
    added, vjp = jax.vjp(add_to_rows, x, y)
    np.testing.assert_array_equal(added, x + y)
    cotangent = jnp.asarray(normal(6, 5, 4, seed=1), dtype)
    of_x, of_y = vjp(cotangent)
    np.testing.assert_array_equal(of_x, cotangent)
    assert of_y.dtype == dtype
    wanted = np.asarray(cotangent, np.float64).sum(0)
    tolerance = 1e-6 if dtype == jnp.float32 else 8e-3
    np.testing.assert_allclose(of_y.astype(jnp.float32), wanted, tolerance, tolerance)
