"""Are means over shards those of all rows, and does an all-to-all bring the tokens?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh, rows_spec
from jaxpar.sharding.exchange import PARTS, all_to_all, batch_mean, counting_means

MESH = make_mesh(MeshShape(data=2, expert=2, replica=2))
ROWS = np.arange(16.0, dtype=np.float32).reshape(16, 1)


def on_shards(fn, x, spec=None):
    own = rows_spec(MESH) if spec is None else spec
    names = {"replica", "data", "expert"}
    mapped = jax.shard_map(
        fn, mesh=MESH, in_specs=own, out_specs=own, axis_names=names, check_vma=False
    )
    return jax.jit(mapped)(x)


def test_mean_of_the_shards_means_is_that_of_all_rows():
    means = on_shards(lambda x: batch_mean(x.mean(0, keepdims=True)) + 0 * x, ROWS)
    np.testing.assert_allclose(means, np.full((16, 1), ROWS.mean()))


def test_mean_in_half_precision_is_computed_in_fp32():
    values = jnp.asarray(ROWS, jnp.bfloat16)
    means = on_shards(lambda x: batch_mean(x.mean(0, keepdims=True)) + 0 * x, values)
    assert means.dtype == jnp.bfloat16
    np.testing.assert_allclose(means.astype(np.float32), np.full((16, 1), 7.5))


def test_gradient_of_a_mean_reaches_every_shard():
    def total(x):
        return jnp.mean(on_shards(lambda x: batch_mean(x) ** 2, x))

    grad = jax.grad(total)(ROWS)
    shards = ROWS.reshape(8, 2).mean(0)  # Row i of every shard is averaged.
    np.testing.assert_allclose(grad, np.tile(2 * shards, 8)[:, None] / 16, rtol=1e-6)


def test_parts_that_are_mapped_side_by_side_have_one_mean():
    means = jax.vmap(batch_mean, axis_name=PARTS)(jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(means, [2.0, 2.0])


def test_experts_get_their_tokens_of_every_shard_and_send_them_back():
    tokens = np.random.default_rng(0).normal(size=(8 * 4, 3, 2)).astype(np.float32)

    def there(x_ECD):
        own = all_to_all(x_ECD, split=0, concat=1)
        assert own.shape == (2, 6, 2)
        return own

    got = on_shards(there, tokens).reshape(4, 2, 2, 6, 2)
    sent = tokens.reshape(4, 2, 2, 2, 3, 2)  # Pair, shard, piece, expert, place, width.
    want = np.moveaxis(sent, 1, 3).reshape(4, 2, 2, 6, 2)
    np.testing.assert_array_equal(got, want)
    back = on_shards(
        lambda x: all_to_all(all_to_all(x, split=0, concat=1), split=1, concat=0),
        tokens,
    )
    np.testing.assert_array_equal(back, tokens)


def test_both_are_the_identity_on_one_device():
    assert batch_mean(ROWS) is ROWS
    x = jnp.asarray(ROWS)
    assert all_to_all(x, split=0, concat=1) is x


def test_means_are_counted():
    with counting_means() as means:
        jax.eval_shape(lambda x: batch_mean(batch_mean(x)), ROWS)
    assert len(means) == 2


def test_dim_that_the_experts_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"all_to_all: dim 0 of shape \(3, 1\) has 3"):
        on_shards(lambda x: all_to_all(x, split=0, concat=1), ROWS[:3], P())
