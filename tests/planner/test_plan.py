"""Does a plan say what the compiled step holds, moves and computes?"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.compiled.closed_form import step_bytes
from jaxpar.mesh import MeshShape, compile_only
from jaxpar.step.precision import make_precision
from tests.model.toys import BATCHES, HIDDEN, WIDTH, make_model
from tests.model.toys import make_engine as make_pipelined
from tests.model.toys import make_mesh as make_pipes

ROWS, IN, MIDDLE = 32, 64, 128
PSI = 2 * IN * MIDDLE
KEYS = {
    "target", "compiled_for", "num_devices", "mesh", "zero", "precision", "num_params",
    "bytes_per_device", "device_memory_bytes", "fits", "collectives",
    "collective_bytes_per_device", "flops_per_step", "model_flops_per_step",
    "tokens_per_step", "compile_seconds", "estimate", "notes", "links", "schedule",
}  # fmt: skip
MEMORY_KEYS = {
    "state", "padding", "parameters", "optimizer", "batch", "temporaries", "copies",
    "gradients", "activations", "peak",
}  # fmt: skip


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(IN, MIDDLE, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(MIDDLE, IN, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["x"]) ** 2)


def make_engine(**change) -> jaxpar.Engine:
    right = {
        "model": lambda rngs: Net(rngs),
        "loss_fn": loss_fn,
        "optimizer": optax.adam(1e-3),
        "sample_batch": {"x": jax.ShapeDtypeStruct((ROWS, IN), np.float32)},
        "mesh": make_pipes(data=8),
    }
    return jaxpar.initialize(**(right | change))


def planned(make=make_engine, *args, **change) -> jaxpar.Engine:
    """An engine of shapes, which is planned in this process."""
    with compile_only():
        return make(*args, **change)


@pytest.fixture(scope="module")
def plan():
    return jaxpar.plan(planned(zero=1, precision="bf16"), "cpu:8", tokens_per_step=640)


def test_keys_are_those_that_programs_rely_on(plan):
    found = json.loads(plan.as_json())
    assert set(found) == KEYS
    assert set(found["bytes_per_device"]) == MEMORY_KEYS
    assert set(found["collectives"][0]) == {
        "op", "axis", "dtype", "count", "bytes", "sent_bytes",
    }  # fmt: skip
    assert found["mesh"] == {"data": 8, "pipe": 1, "tensor": 1}
    assert found["num_params"] == PSI
    assert (found["fits"], found["estimate"]) == (None, None)
    assert "XLA:CPU makes all-reduces" in found["notes"][0]


def test_state_is_the_masters_and_both_moments_split_over_data(plan):
    assert plan.memory.parameters == 4 * PSI // 8
    small = plan.memory.optimizer - 8 * PSI // 8
    assert 0 <= small < 64
    assert plan.memory.batch == 4 * ROWS * IN // 8
    assert plan.memory.copies == 2 * PSI
    assert plan.memory.gradients == 2 * PSI


@pytest.mark.parametrize(
    ("zero", "copies", "gradients"),
    [(0, 0, 4 * PSI), (1, 4 * PSI, 4 * PSI), (2, 4 * PSI, PSI // 2), (3, 0, PSI // 2)],
)
def test_what_a_step_holds_besides_is_its_row_of_the_table(zero, copies, gradients):
    """A copy in fp32 is made by the gather; gradients stay split from stage 2 on."""
    engine = make_engine(zero=zero)
    closed_form = dataclasses.replace(engine.closed_form, accumulate=2)
    assert step_bytes(engine.placement.leaves.values(), closed_form) == (
        copies,
        gradients,
    )


@pytest.mark.parametrize(
    ("zero", "reduce_dtype", "platform", "gradients"),
    [
        (1, None, "gpu", 2 * PSI),
        (2, None, "gpu", 2 * PSI // 8),
        (3, None, "gpu", 2 * PSI // 8),
        (2, "fp32", "gpu", 4 * PSI // 8),
        (2, None, "cpu", 4 * PSI // 8),
    ],
)
def test_gradients_of_one_microbatch_lie_in_the_dtype_that_they_are_made_or_cross_in(
    zero, reduce_dtype, platform, gradients
):
    engine = make_engine(zero=zero)
    precision = make_precision("bf16", reduce_dtype)
    closed_form = dataclasses.replace(
        engine.closed_form, precision=precision, platform=platform
    )
    plans = engine.placement.leaves.values()
    assert step_bytes(plans, closed_form)[1] == gradients
    several = dataclasses.replace(closed_form, accumulate=4)
    assert step_bytes(plans, several)[1] == 4 * PSI // (1 if zero == 1 else 8)


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
