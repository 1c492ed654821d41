"""What is compiled: a function of three arrays, some of them in host memory."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.compiled.host_arguments import name_host_arguments
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.planner.absent_devices import gpu_devices


def host_bytes(numbers: tuple[int, ...]) -> int:
    """Bytes of the arguments in host memory, with those of some numbers named."""
    mesh = make_mesh(MeshShape(), gpu_devices("h200", 1, 1))
    place = NamedSharding(mesh, P())
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=place)
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def add(*arrays: jax.Array) -> jax.Array:
        kept = [
            jax.device_put(x, host) if number in numbers else x
            for number, x in enumerate(arrays)
        ]
        return sum(jax.device_put(x, device) for x in kept)

    lowered = jax.jit(add).trace(*[shape] * 3).lower(lowering_platforms=("cuda",))
    name_host_arguments(lowered, numbers)
    return lowered.compile().memory_analysis().host_argument_size_in_bytes
