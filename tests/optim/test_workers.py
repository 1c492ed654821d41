"""What do workers send, and which share of the whole is theirs?"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.optim import Wire
from jaxpar.optim.onebit_reduction import OneBitMomentum
from jaxpar.optim.workers import norm_of_sums, own_shard, whole_sum
from jaxpar.sharding.collectives import ManualCollectives
from jaxpar.sharding.zero import shard_leaves, zero_stage


def test_shards_of_a_sum_have_its_norm() -> None:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=4), jax.devices()[:4])
    shapes = {"w": jax.ShapeDtypeStruct((64, 8), jnp.float32)}
    specs = {"w": (None, None)}
    found = shard_leaves(shapes, specs, zero_stage(1), mesh.shape)
    leaf = found["w"].on_shard
    assert leaf.is_split
    own = np.random.default_rng(0).normal(size=(4, 64, 8)).astype(np.float32)
    collectives = ManualCollectives(("data",), jnp.dtype(jnp.float32), "cpu")

    def body(view: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        total = whole_sum(leaf, view[0], collectives)
        shard = own_shard(leaf, total)
        return total, shard, norm_of_sums([leaf], [shard], collectives)

    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=P("data"),
        out_specs=(P(), leaf.batch_spec, P()),
        axis_names={"data"},
        check_vma=False,
    )
    total, shards, norm = jax.jit(run)(own)
    np.testing.assert_allclose(total, own.sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(shards, total)
    np.testing.assert_allclose(norm, np.linalg.norm(own.sum(0)), rtol=1e-5)
    # A bit an element and a scale, to and from each of four.
    sent = OneBitMomentum(3, 0.9).communicated([leaf], Wire(mesh.shape, 4))["data"]
    assert sent == dict.fromkeys(("all-to-all", "all-gather"), 64 * 8 // 8 + 4 * 4)
