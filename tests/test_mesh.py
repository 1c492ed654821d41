"""Does a mesh shape become the mesh it says, or an error that says why not?"""

import itertools
import math
import types

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from jaxpar.mesh import AXES, MeshShape, make_mesh

SIZES = (-1, 1, 2, 3, 8)


@pytest.mark.parametrize("num_devices", [1, 6, 8])
def test_resolve_keeps_given_sizes_and_uses_every_device(num_devices):
    """All small cases against brute force over the open axis."""
    for sizes in itertools.product(SIZES, repeat=3):
        if sizes.count(-1) > 1:
            continue
        fits = {
            tuple(fill if size == -1 else size for size in sizes)
            for fill in range(1, num_devices + 1)
        }
        fits = {shape for shape in fits if math.prod(shape) == num_devices}
        shape = MeshShape(*sizes)
        if fits:
            found = shape.resolve(num_devices)
            assert {(found.data, found.pipe, found.tensor)} == fits
        else:
            with pytest.raises(ValueError, match="mesh: MeshShape"):
                shape.resolve(num_devices)


def test_shape_that_needs_other_devices_says_how_many():
    message = (
        r"mesh: MeshShape\(data=4, pipe=1, tensor=4\) needs 16 devices, but there are "
        r"8\. Change the shape .*devices=jax\.devices\(\)\[:n\]"
    )
    with pytest.raises(ValueError, match=message):
        make_mesh(MeshShape(data=4, tensor=4))


def test_open_shape_that_does_not_divide_says_the_multiple():
    message = r"data=-1, pipe=1, tensor=3\) needs a multiple of 3 devices.* are 8\."
    with pytest.raises(ValueError, match=message):
        make_mesh(MeshShape(tensor=3))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -2, 2.0, "2"])
def test_size_that_is_no_number_of_devices_raises(axis, size, unchecked_types):
    message = rf"mesh: MeshShape\({axis}={size}\) must be a positive number.* or -1"
    with pytest.raises(ValueError, match=message):
        MeshShape(**{axis: size})


def test_two_open_axes_raise():
    with pytest.raises(ValueError, match="mesh: data and tensor are both -1; only one"):
        MeshShape(data=-1, tensor=-1)


@pytest.mark.parametrize("shape", ["4x2", {"data": 4}])
def test_mesh_that_is_no_shape_raises(shape, unchecked_types):
    with pytest.raises(TypeError, match=r"mesh=.*must be a jaxpar\.MeshShape, such as"):
        make_mesh(shape)


def test_mesh_has_three_automatic_axes():
    mesh = make_mesh(MeshShape(data=2, tensor=4))
    assert mesh.axis_names == ("data", "pipe", "tensor")
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh.devices.shape == (2, 1, 4)


def test_tensor_neighbours_are_neighbouring_devices():
    mesh = make_mesh(MeshShape(data=2, tensor=4))
    ids = [[device.id for device in row] for row in mesh.devices[:, 0]]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_mesh_takes_some_devices():
    mesh = make_mesh(MeshShape(tensor=2), jax.devices()[4:])
    assert sorted(device.id for device in mesh.devices.flat) == [4, 5, 6, 7]


def test_several_slices_are_split_along_data(monkeypatch):
    """The slow network carries the data axis alone."""
    seen = {}

    def hybrid(within, across, devices):
        seen.update(within=within, across=across)
        return np.array(jax.devices()).reshape(4, 1, 2)

    monkeypatch.setattr(mesh_utils, "create_hybrid_device_mesh", hybrid)
    devices = [
        types.SimpleNamespace(slice_index=number // 4, platform="tpu")
        for number in range(8)
    ]
    make_mesh(MeshShape(data=4, tensor=2), devices)
    assert seen == {"within": (2, 1, 2), "across": (2, 1, 1)}


def test_tpu_devices_are_laid_out_for_locality(monkeypatch):
    grid = np.array(jax.devices())[::-1].reshape(4, 1, 2)
    monkeypatch.setattr(mesh_utils, "create_device_mesh", lambda *_: grid)
    devices = [types.SimpleNamespace(platform="tpu") for _ in range(8)]
    mesh = make_mesh(MeshShape(data=4, tensor=2), devices)
    assert np.array_equal(mesh.devices, grid)
