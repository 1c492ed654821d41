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
from jaxpar.mesh import compile_only
from jaxpar.step.precision import make_precision
from tests.model.toys import make_mesh as make_pipes

ROWS, IN, MIDDLE = 32, 64, 128
PSI = 2 * IN * MIDDLE
KEYS = {
    "target", "compiled_for", "num_devices", "mesh", "zero", "precision", "num_params",
    "bytes_per_device", "device_memory_bytes", "fits", "collectives",
    "collective_bytes_per_device", "flops_per_step", "model_flops_per_step",
    "tokens_per_step", "compile_seconds", "estimate", "notes", "links", "schedule",
    "exposed", "host_memory_bytes", "host",
}  # fmt: skip
MEMORY_KEYS = {
    "state", "padding", "parameters", "optimizer", "batch", "temporaries", "copies",
    "gradients", "activations", "peak", "host_state",
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


@pytest.mark.parametrize(("zero", "copies"), [(0, 0), (1, 2 * PSI)])
def test_copies_that_an_update_keeps_are_in_the_state(zero, copies):
    """At ZeRO 1 the ones that are gathered from them are not."""
    offload = jaxpar.Offload(piece_mb=0.01)
    plan = jaxpar.plan(planned(zero=zero, precision="bf16", offload=offload), "cpu:8")
    assert plan.memory.copies == copies
    assert plan.memory.parameters == 2 * PSI // (8 if zero else 1)
    assert plan.memory.host_state == 12 * PSI // (8 if zero else 1)


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
