"""Does each device call the host for itself, in loops, and with its own arrays?"""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.mesh import on_abstract_mesh
from jaxpar.offload.host_call import host_call, planned_call


def test_every_device_calls_with_its_own_arrays() -> None:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=2, tensor=2), jax.devices()[:4])
    given: dict[tuple[int, int], np.ndarray] = {}
    lock = threading.Lock()

    def twice(device: np.ndarray, number: np.ndarray, x: np.ndarray) -> np.ndarray:
        with lock:
            given[int(device), int(number)] = np.array(x)
        return 2 * x

    def on_device(x: jax.Array) -> jax.Array:
        device = jax.lax.axis_index(mesh.axis_names)
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)

        def turn(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            return host_call(twice, out, device, number, x), None

        return jax.lax.scan(turn, x, jnp.arange(3))[0]

    x = jnp.arange(4 * (1 << 16), dtype=jnp.float32).reshape(4, -1)
    spec = P(("data", "tensor"))
    with on_abstract_mesh(mesh):
        run = functools.partial(jax.shard_map, in_specs=spec, out_specs=spec)
        found = jax.jit(run(on_device, mesh=mesh, check_vma=False))(x)
    np.testing.assert_array_equal(found, 8 * np.asarray(x))
    assert len(given) == 4 * 3
    for (device, number), array in given.items():
        np.testing.assert_array_equal(array[0], 2**number * np.asarray(x)[device])


def test_a_planned_call_has_the_shape() -> None:
    out = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    traced = jax.jit(lambda x: planned_call("test", out, x)).trace(jnp.ones(4))
    assert "jaxpar.planned.test" in traced.lower().as_text()
    assert jax.eval_shape(lambda x: planned_call("test", out, x), jnp.ones(4)) == out
