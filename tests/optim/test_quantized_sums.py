"""Is what rounding leaves out between replicas kept as LoCo says, and for how long?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.optim.quantized_sums import QuantizedSums
from jaxpar.sharding.block_codes import BlockCodes
from jaxpar.sharding.collectives import ManualCollectives
from jaxpar.sharding.zero import shard_leaves, zero_stage

CODES = BlockCodes(4, block=8)


def quantized(x: np.ndarray) -> np.ndarray:
    """Codes of blocks of 8 in NumPy, of a replica's part for each replica."""
    parts = x.reshape(2, -1, 8)
    scales = np.abs(parts).max(-1, keepdims=True) / 7
    return (np.round(parts / scales) * scales).reshape(x.shape)


@pytest.mark.parametrize("over_replicas", [False, True])
def test_errors_are_those_of_numpy(over_replicas) -> None:
    shape = jaxpar.MeshShape(replica=2, data=2)
    mesh = jaxpar.make_mesh(shape, jax.devices()[:4])
    shapes = {"w": jax.ShapeDtypeStruct((64, 8), jnp.float32)}
    leaf = shard_leaves(shapes, {"w": (None, None)}, zero_stage(3), mesh.shape)["w"]
    leaf = dataclasses.replace(leaf, over_replicas=over_replicas)
    assert leaf.data_dim == 0
    reduction = QuantizedSums(CODES, CODES, 0.8, 3)
    collectives = ManualCollectives(("replica", "data"), jnp.dtype(jnp.float32), "cpu")

    def body(view: jax.Array, count: jax.Array, error: jax.Array) -> tuple:
        carry = {"count": count, "errors": {"w": error[0]}}
        sums, carry = reduction.between([leaf], [view[0]], carry, collectives)
        return sums[0], carry["count"], carry["errors"]["w"][None]

    rows = P(("replica", "data"))
    run = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(rows, P(), rows),
            out_specs=(leaf.batch_spec, P(), rows),
            axis_names={"replica", "data"},
            check_vma=False,
        )
    )
    rng, count = np.random.default_rng(0), jnp.int32(0)
    error = right = np.zeros((4, 32, 8), np.float32)
    for step in range(4):
        views = rng.normal(size=(4, 32, 8)).astype(np.float32)
        given = views + right
        sent = np.stack([quantized(x) for x in given])
        right = 0.8 * right + 0.2 * (given - sent)
        if step == 2:
            right = np.zeros_like(right)
        total, count, error = run(views, count, error)
        np.testing.assert_allclose(error, right, atol=1e-5)
        # Devices are replica by replica, in two data shards each.
        sums = sent[:2] + sent[2:]
        if not over_replicas:  # Each gets the other's part, coded once more.
            sums = np.stack([quantized(x) for x in sums])
        np.testing.assert_allclose(total, sums.reshape(64, 8), atol=1e-5)
    assert int(count) == 4
