"""Is the device of a traced program that of its mesh, where it has one?"""

import jax

from jaxpar.jaxprs.device import device_kind


def test_an_absent_device_comes_before_the_present_ones() -> None:
    assert device_kind() == jax.devices()[0].device_kind
    gpu = jax.sharding.AbstractDevice("NVIDIA H200", 132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=gpu)
    with jax.sharding.use_abstract_mesh(mesh):
        assert device_kind() == "NVIDIA H200"
