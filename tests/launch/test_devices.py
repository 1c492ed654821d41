"""Does a run get the CPU devices its mesh needs, before jax fixes their number?

The number of devices is fixed once in a process, so each case has its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxpar.launch import choose_mesh, choose_meshes, cpu_devices
from jaxpar.mesh import MeshShape

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
from jaxpar.launch import choose_mesh
from jaxpar.mesh import MeshShape
first, *again = json.loads(sys.argv[1])
def choose(sizes):
    shape = MeshShape(*(sizes or ()))
    try:
        mesh = choose_mesh(shape, on_cpu=MeshShape(data=2, tensor=2))
        return dict(mesh.shape)
    except ValueError as error:
        return str(error)
print(json.dumps([*map(choose, [first, *again]), len(jax.devices())]))
"""

TO_TRY = """
import jax, jaxpar
print(len(jaxpar.cpu_devices(4)), len(jax.devices("cpu")))
print(len(jaxpar.cpu_devices(2)), len(jax.devices("cpu")))
try:
    jaxpar.cpu_devices(5)
except ValueError as error:
    print(error)
"""


def chosen(*shapes) -> list:
    """What a fresh process answers to each shape, and its number of devices."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(shapes)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout)


def shape(data=1, pipe=1, tensor=1):
    return {"data": data, "pipe": pipe, "tensor": tensor}


def test_cpu_run_makes_the_devices_of_its_default_mesh_and_keeps_them():
    """The first call fixes four devices; the others get some of them, or an error."""
    found = chosen(None, [1, 1, 2], [-1, 1, 2], [8, 1, 1])
    assert found[:3] == [shape(2, 1, 2), shape(1, 1, 2), shape(2, 1, 2)]
    assert found[3].startswith(
        "mesh: MeshShape(data=8, pipe=1, tensor=1) needs 8 devices, but there are 4."
    )
    assert found[4] == 4


def test_cpu_run_makes_the_devices_of_its_shape_and_none_for_an_open_axis():
    assert chosen([-1, 1, 2]) == [shape(1, 1, 2), 2]


def test_cpu_run_counts_replicas_and_experts_too():
    assert chosen([-1, 1, 1, 2, 2])[1] == 4
    assert chosen([1, 1, 2, 1, 3]) == [{**shape(1, 1, 2), "expert": 3}, 6]


def test_cpu_devices_are_as_many_as_asked_for_and_then_fixed():
    done = subprocess.run(
        [sys.executable, "-c", TO_TRY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    four, two, said = done.stdout.splitlines()
    assert (four, two) == ("4 4", "2 4")
    assert said == (
        "cpu_devices: number=5, but jax has started with 4 CPU devices, and keeps that "
        "number. Call cpu_devices in a new process, before anything asks jax for "
        "devices (arrays, jax.devices(), a mesh)."
    )


def test_cpu_devices_are_the_first_of_those_that_there_are():
    there_are = jax.devices()
    assert cpu_devices(3) == there_are[:3]
    assert len(jax.devices()) == len(there_are)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("number", [0, "4", 2.0])
def test_cpu_devices_are_a_number_of_at_least_one(number):
    said = rf"^cpu_devices: number={number!r} must be an integer of at least 1\.$"
    with pytest.raises(ValueError, match=said):
        cpu_devices(number)


@pytest.mark.parametrize("wanted", [MeshShape(), MeshShape(tensor=4)])
def test_accelerators_are_all_used_whatever_the_cpu_mesh(wanted, monkeypatch):
    """Four devices that say they are GPUs."""
    given = []
    jax.devices()  # Fixed: what is chosen here must not choose for later tests.

    class Gpu:
        platform = "gpu"

    def record(shape, devices):
        given.append((shape, len(devices)))
        return "mesh"

    monkeypatch.setattr(jax, "devices", lambda: [Gpu() for _ in range(8)])
    monkeypatch.setattr("jaxpar.launch.devices.make_mesh", record)
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    assert choose_mesh(wanted, on_cpu=MeshShape(data=2)) == "mesh"
    assert given == [(wanted, 8)]


def test_a_run_on_cpus_ends_on_another_mesh_unless_one_is_asked_for():
    cpu = MeshShape(data=2, tensor=2)
    (first, three), (second, all_steps) = choose_meshes(MeshShape(), 100, on_cpu=cpu)
    assert (first.shape["tensor"], three, all_steps) == (2, 75, 100)
    assert second.shape["data"] == second.size
    ((mesh, steps),) = choose_meshes(MeshShape(data=2), 100, on_cpu=cpu)
    assert (mesh.shape["data"], steps) == (2, 100)
