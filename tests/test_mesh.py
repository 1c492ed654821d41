"""Does a mesh shape become the mesh it says, or an error that says why not?"""

import dataclasses
import itertools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import mesh as mesh_module
from jaxpar.mesh import (
    AXES,
    MeshShape,
    as_mesh,
    compile_only,
    cpu_twin,
    make_mesh,
    num_batch_shards,
    rows_spec,
)

SIZES = (-1, 1, 2, 3, 8)


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh looks at of a device that is not here."""

    id: int
    process_index: int = 0
    slice_index: int = 0
    platform: str = "tpu"


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
    devices = [Device(number, slice_index=number // 4) for number in range(8)]
    make_mesh(MeshShape(data=4, tensor=2), devices)
    assert seen == {"within": [2, 1, 2], "across": [2, 1, 1]}


def test_several_slices_are_split_along_replicas_where_there_are_any(monkeypatch):
    seen = {}

    def hybrid(within, across, devices):
        seen.update(within=within, across=across)
        return np.array(jax.devices()).reshape(2, 2, 1, 2)

    monkeypatch.setattr(mesh_utils, "create_hybrid_device_mesh", hybrid)
    devices = [Device(number, slice_index=number // 4) for number in range(8)]
    make_mesh(MeshShape(data=2, tensor=2, replica=2), devices)
    assert seen == {"within": [1, 2, 1, 2], "across": [2, 1, 1, 1]}


def test_replicas_are_outermost_and_only_there_where_wanted():
    mesh = make_mesh(MeshShape(data=2, tensor=2, replica=2))
    assert dict(mesh.shape) == {"replica": 2, "data": 2, "pipe": 1, "tensor": 2}
    assert [device.id for device in mesh.devices[0].flat] == [0, 1, 2, 3]
    assert rows_spec(mesh) == P(("replica", "data"))
    assert num_batch_shards(mesh) == 4
    plain = make_mesh(MeshShape(data=4, tensor=2))
    assert plain.axis_names == ("data", "pipe", "tensor")
    assert rows_spec(plain) == P("data")


def test_axes_of_one_role_become_one_axis_of_the_same_groups():
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"))
    merged = make_mesh(mesh, roles={"x": "tensor", "y": "data", "z": "tensor"})
    assert dict(merged.shape) == {"data": 2, "pipe": 1, "tensor": 4}
    groups = [sorted(d.id for d in row) for row in merged.devices[:, 0]]
    assert groups == [sorted(d.id for d in mesh.devices[:, y].flat) for y in range(2)]
    assert as_mesh(merged) is merged


def test_roles_of_a_shape_are_refused():
    with pytest.raises(ValueError, match=r"roles=\{'x': 'data'\} are for a mesh"):
        make_mesh(MeshShape(), roles={"x": "data"})


@pytest.mark.parametrize(
    "roles",
    [{"x": "data"}, {"x": "data", "y": "rows"}, {"x": "data", "q": "tensor"}],
    ids=["an axis without a role", "unknown role", "unknown axis"],
)
def test_roles_that_do_not_fit_the_mesh_are_refused(roles):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    with pytest.raises(ValueError, match=r"roles=.* must give each axis of the mesh"):
        make_mesh(mesh, roles=roles)


def test_tpu_devices_are_laid_out_for_locality(monkeypatch):
    grid = np.array(jax.devices())[::-1].reshape(4, 1, 2)
    monkeypatch.setattr(mesh_utils, "create_device_mesh", lambda *_: grid)
    mesh = make_mesh(MeshShape(data=4, tensor=2), [Device(n) for n in range(8)])
    assert np.array_equal(mesh.devices, grid)


def test_smaller_shape_takes_the_first_devices_and_says_so_once(caplog):
    mesh_module._warn_once.cache_clear()
    for _ in range(2):
        mesh = make_mesh(MeshShape(data=3))
        assert [device.id for device in mesh.devices.flat] == [0, 1, 2]
    (line,) = caplog.messages
    assert line == (
        "mesh: MeshShape(data=3, pipe=1, tensor=1) uses 3 of 8 devices; an axis of -1 "
        "takes the devices left over, and devices= chooses which to use."
    )
    assert caplog.records[0].name == "jaxpar"
    assert caplog.records[0].levelname == "WARNING"


def test_shape_of_all_devices_says_nothing(caplog):
    mesh_module._warn_once.cache_clear()
    make_mesh(MeshShape())
    make_mesh(MeshShape(data=2), jax.devices()[2:4])
    assert caplog.messages == []


def laid_out(monkeypatch, shape, owners):
    """Which of the devices, given their processes, a shape takes."""
    monkeypatch.setattr(jax, "process_count", lambda: max(owners) + 1)
    seen = []

    def lay_out(sizes, devices):
        seen.extend(device.id for device in devices)
        return np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)

    monkeypatch.setattr(mesh_utils, "create_device_mesh", lay_out)
    make_mesh(shape, [Device(n, owner) for n, owner in enumerate(owners)])
    return seen


@pytest.mark.parametrize(
    ("shape", "owners", "taken"),
    [
        (MeshShape(data=4), (0, 0, 0, 0, 1, 1, 1, 1), [0, 1, 4, 5]),
        (MeshShape(data=2, tensor=2), (0, 1, 0, 1, 0, 1), [0, 1, 2, 3]),
        (MeshShape(data=4), (0, 0, 0, 0, 1, 1), [0, 1, 4, 5]),
        (MeshShape(), (1, 0, 0, 1), [0, 1, 2, 3]),
        (MeshShape(tensor=3), (0, 1, 2), [0, 1, 2]),
    ],
)
def test_processes_own_equal_shares_of_a_mesh(monkeypatch, shape, owners, taken):
    assert laid_out(monkeypatch, shape, owners) == taken


@pytest.mark.parametrize(
    ("shape", "owners", "message"),
    [
        (MeshShape(), (0, 0, 0, 1, 1), r"takes 5 of 5 .* are \{0: 3, 1: 2\}\."),
        (MeshShape(data=3), (0, 0, 1, 1), r"takes 3 of 4 .* are \{0: 2, 1: 2\}\."),
        (MeshShape(data=4), (0, 0, 0, 0, 1), r"takes 4 of 5 .* are \{0: 4, 1: 1\}\."),
        (MeshShape(data=1), (0, 1), r"takes 1 of 2 devices, but the processes don't"),
        (MeshShape(data=2), (1, 1), r"are \{0: 0, 1: 2\}\. .* Change the shape, or "
         r"pass devices= with the same number from each process"),
    ],
)  # fmt: skip
def test_processes_that_would_own_unequal_shares_raise(
    monkeypatch, shape, owners, message
):
    with pytest.raises(ValueError, match=message):
        laid_out(monkeypatch, shape, owners)


@pytest.mark.parametrize("devices", [4, [0, 1], {0: jax.Device}])
def test_devices_that_are_none_raise(devices, unchecked_types):
    with pytest.raises(TypeError, match=r"devices=.* must be a sequence of JAX dev"):
        make_mesh(MeshShape(), devices)


def test_device_named_twice_raises():
    first = jax.devices()[0]
    with pytest.raises(ValueError, match=r"devices=.* must name each device once"):
        make_mesh(MeshShape(), [first, first])


def make_engine(**change):
    given = {
        "model": lambda rngs: nnx.Linear(4, 2, rngs=rngs),
        "loss_fn": lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        "optimizer": optax.sgd(0.1),
        "sample_batch": {"x": np.ones((8, 4), np.float32)},
    }
    return jaxpar.initialize(**(given | change))


def test_engine_takes_the_devices_that_it_is_given():
    chosen = jax.devices()[6:]
    engine = make_engine(devices=chosen, mesh=MeshShape())
    params = jax.tree.map(np.array, engine.state.params)
    x = np.linspace(0, 1, 32, dtype=np.float32).reshape(8, 4)
    loss = float(engine.step({"x": x})["loss"])
    plain = np.mean((x @ params["kernel"] + params["bias"]) ** 2)
    assert loss == pytest.approx(plain, rel=1e-6)
    for leaf in jax.tree.leaves(engine.state.params):
        assert leaf.sharding.device_set == set(chosen)


def test_engine_of_one_device_is_made_where_there_are_eight():
    engine = make_engine(mesh=MeshShape(data=1))
    assert list(engine.mesh.devices.flat) == jax.devices()[:1]


def test_a_mesh_of_cpus_or_of_devices_that_are_not_here_is_its_own_twin() -> None:
    mesh = make_mesh(MeshShape(data=2), jax.devices()[:2])
    assert cpu_twin(mesh) is mesh
    with compile_only():
        assert cpu_twin(mesh) is mesh


@pytest.mark.parametrize("cpus", [4, 2])
def test_the_twin_of_a_mesh_of_others_has_a_cpu_for_each(cpus: int) -> None:
    mesh = make_mesh(MeshShape(data=2, tensor=2), jax.devices()[4:8])
    given = {"cpu": jax.devices()[:cpus], "gpu": jax.devices()[4:8]}
    platform = type(mesh.devices.flat[0])
    with (
        mock.patch.object(mesh_module, "are_present", return_value=True),
        mock.patch.object(mesh_module, "_platform", return_value="gpu"),
        mock.patch.object(jax, "devices", given.__getitem__),
    ):
        if cpus < 4:
            with pytest.raises(ValueError, match=r"4 gpu devices and 2 CPU.*=4"):
                cpu_twin(mesh)
            return
        twin = cpu_twin(mesh)
    assert isinstance(twin.devices.flat[0], platform)
    assert [x.id for x in twin.devices.flat] == [x.id - 4 for x in mesh.devices.flat]
    assert twin.shape == mesh.shape
