"""Are coded gathers and reductions the plain ones but for rounding?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.sharding.block_codes import BlockCodes
from jaxpar.sharding.collectives import ManualCollectives, manual_spec
from jaxpar.sharding.quantized import QuantizedCollectives
from jaxpar.sharding.zero import shard_leaves, zero_stage

CODES = BlockCodes(8, block=16)


@pytest.mark.parametrize("over_replicas", [False, True])
def test_gathers_and_reductions_are_the_plain_ones_nearly(over_replicas) -> None:
    shape = jaxpar.MeshShape(replica=2, data=2)
    mesh = jaxpar.make_mesh(shape, jax.devices()[:4])
    whole = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    shapes = {"w": jax.ShapeDtypeStruct(whole.shape, jnp.float32)}
    leaf = shard_leaves(shapes, {"w": (None, None)}, zero_stage(3), mesh.shape)["w"]
    leaf = dataclasses.replace(leaf, over_replicas=over_replicas)
    given = ("replica", "data"), jnp.dtype(jnp.float32), "cpu"

    def run(collectives: ManualCollectives) -> tuple[np.ndarray, np.ndarray]:
        def body(shard: jax.Array) -> tuple:
            inside = collectives.gather_replicas(leaf, shard)
            gathered = collectives.gather(leaf, inside)
            view = collectives.reduce(leaf, gathered)
            return gathered, collectives.reduce_replicas(leaf, view)

        spec = manual_spec(leaf)
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=spec,
            out_specs=(jax.P(), spec),
            axis_names=set(given[0]),
            check_vma=False,
        )
        return jax.device_get(jax.jit(mapped)(whole))

    gathered, total = run(ManualCollectives(*given))
    np.testing.assert_array_equal(gathered, whole)
    np.testing.assert_allclose(total, 4 * whole, rtol=1e-6)
    coded, summed = run(QuantizedCollectives(*given, (), CODES, CODES))
    assert 1e-4 < np.abs(coded - whole).max() < 3e-2
    assert 1e-4 < np.abs(summed - 4 * whole).max() < 0.2
