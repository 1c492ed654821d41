"""Is a leaf's copy made of what its pieces compute?"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.offload.disk_files import LeafOnDisk
from jaxpar.offload.leaf_work import LeafWork
from jaxpar.offload.on_disk import OnDisk


def test_pieces_get_their_gradient_and_write_their_part_of_the_copy() -> None:
    mesh = make_mesh(MeshShape(data=2, replica=2), jax.devices()[:4])
    place, shape = NamedSharding(mesh, P("data")), (4, 4096)
    leaf = LeafOnDisk(0, "w", (OnDisk(shape, np.dtype(np.float32)),) * 2, place)
    grad = jax.device_put(jnp.arange(4 * 4096.0).reshape(shape), place)

    def run(arrays, scalars):
        master, _, gradient, out, _, copy = arrays
        assert out is master
        out[:] = master - scalars[0] * gradient
        copy[:] = out

    copy = jax.device_put(jnp.zeros(shape, jnp.bfloat16), place)
    work = LeafWork(leaf, run, grad, [np.asarray(np.float32(2))], copy)
    pieces = list(work.pieces(4096))
    assert len(pieces) == 2 * 2  # Replicas share a shard.
    for piece in pieces:
        size = piece.stop - piece.start
        piece.compute(piece, [np.ones(size, np.float32), np.zeros(size, np.float32)])
    (new,) = work.new_copies().values()
    assert new.sharding == place
    right = (1 - 2 * np.asarray(grad)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(new, right)
