"""Is a step planned on the devices of its target, and are its FLOPs those by hand?"""

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar.mesh import MeshShape
from tests.model.toys import BATCHES, HIDDEN, WIDTH, make_model
from tests.model.toys import make_engine as make_pipelined
from tests.model.toys import make_mesh as make_pipes
from tests.planner.test_plan import IN, MIDDLE, PSI, ROWS, make_engine, planned


@pytest.mark.parametrize("accumulate", [1, 4])
def test_operations_are_three_products_of_every_weight(accumulate):
    """The input's own gradient is not computed."""
    found = jaxpar.plan(planned(accumulate=accumulate), "cpu:8")
    forward = 2 * ROWS * PSI
    assert found.model_flops_per_step == 3 * forward
    assert found.flops_per_step == 3 * forward - 2 * ROWS * IN * MIDDLE


@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("full", 1)])
def test_pipeline_counts_every_block_and_no_idle_slot(remat, again):
    model = make_model(num_blocks=4, remat=remat)
    mesh = make_pipes(pipe=2)
    engine = planned(make_pipelined, model, mesh=mesh, accumulate=4)
    whole = jaxpar.plan(planned(make_pipelined, model, accumulate=4), "cpu:1")
    found = jaxpar.plan(engine, "cpu:2")
    tokens = BATCHES[0]["tokens"].size
    blocks = 2 * tokens * (2 * WIDTH * HIDDEN) * 4
    assert found.model_flops_per_step == whole.model_flops_per_step
    assert found.flops_per_step == found.model_flops_per_step + again * blocks
    assert any("pipe: 1f1b" in note for note in found.notes)


def test_target_of_another_size_takes_another_mesh():
    engine = make_engine(zero=1)
    found = jaxpar.plan(engine, "cpu:16", mesh=MeshShape(tensor=2))
    assert found.mesh == {"data": 8, "pipe": 1, "tensor": 2}
    assert found.num_params == PSI


def test_mesh_that_is_not_of_the_target_is_refused():
    with pytest.raises(ValueError, match=r"needs a multiple of 3 devices, but .* 4\."):
        jaxpar.plan(make_engine(), "cpu:4", mesh=MeshShape(tensor=3))
    engine = planned()
    with pytest.raises(ValueError, match=r"'cpu:4' has 4 devices, but the mesh has 8;"):
        jaxpar.plan(engine, "cpu:4")


def test_what_can_not_be_sent_to_the_compiling_process_is_said(tmp_path):
    with (tmp_path / "log").open("w") as log:

        def loss(model, batch):
            log.write("called")
            return (model(batch["x"]) ** 2).mean()

        engine = make_engine(loss_fn=loss)
        with pytest.raises(ValueError, match=r"plan on cpu:8: .*can't be sent.*pickle"):
            jaxpar.plan(engine, "cpu:8")


def test_nothing_is_placed_on_devices_that_are_only_planned_for():
    engine = planned()
    assert isinstance(engine.state.params["up"]["kernel"], jax.ShapeDtypeStruct)
    with pytest.raises(RuntimeError, match=r"batch: this engine's mesh has 8 compile"):
        engine.step({"x": np.ones((ROWS, IN), np.float32)})
    assert jaxpar.plan(engine, "cpu:8").num_params == PSI
