"""Which options is a step compiled with, and do the user's come first?"""

import jax
import jax.numpy as jnp
import pytest

from jaxpar.compiled.xla_flags import (
    choose_settings,
    compiler_options,
    options_of_all,
)
from jaxpar.mesh import MeshShape, make_mesh

OPTION = "xla_cpu_enable_fast_math"


@pytest.fixture
def mesh():
    return make_mesh(MeshShape(), jax.devices()[:2])


def test_given_options_are_set_and_named_as_given(mesh):
    settings = choose_settings(mesh, {OPTION: True})
    assert compiler_options(settings)[OPTION] is True
    assert {s.why for s in settings if s.option == OPTION} == {"given as xla_options"}


def test_none_leaves_an_option_to_xla(mesh):
    table = compiler_options(choose_settings(mesh))
    assert OPTION not in compiler_options(choose_settings(mesh, {OPTION: None}))
    assert compiler_options(choose_settings(mesh, dict.fromkeys(table))) == {}


def test_every_option_of_the_table_is_known_and_justified(mesh):
    settings = choose_settings(mesh)
    assert all(len(setting.why) > 20 for setting in settings)
    options = compiler_options(settings)
    run = jax.jit(lambda x: x + 1, compiler_options=options)
    assert float(run(jnp.float32(1.0))) == 2.0


def test_programs_of_several_cpu_devices_run_in_an_order_that_is_right():
    one, two = (make_mesh(MeshShape(data=n), jax.devices()[:n]) for n in (1, 2))
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    assert options_of_all(two) == compiler_options(choose_settings(two)) == options
    assert options_of_all(one) == {}
    default = choose_settings(two, {"xla_cpu_scheduler_type": None})
    assert default == ()
