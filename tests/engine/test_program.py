"""What do the compiled functions donate, place and return, whatever they compute?"""

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.engine.focus import Focus
from jaxpar.engine.program import Program, make_program
from jaxpar.engine.step_program import make_step_program
from jaxpar.optim import fused_adamw
from jaxpar.step.loss import Sums
from jaxpar.step.loss_check import NoCheck
from jaxpar.step.train_step import TrainStep
from jaxpar.step.weighted import Max, Sum, Weighted

BATCH = {"x": np.arange(16.0, dtype=np.float32).reshape(8, 2)}


def make_engine(**change: Any) -> jaxpar.Engine:
    given = {
        "model": lambda rngs: nnx.Linear(2, 8, rngs=rngs),
        "loss_fn": lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        "optimizer": optax.adam(0.1),
        "sample_batch": BATCH,
        "mesh": jaxpar.MeshShape(data=4, tensor=2),
    }
    return jaxpar.initialize(**(given | change))


def counted(state, batch):
    """A step that only counts."""
    return dataclasses.replace(state, step=state.step + 1), {"sum": batch["x"].sum()}


def summed(weights, model_state, inputs, key, is_left_over):
    """An evaluation that shows what it is given."""
    x = inputs.batch["x"]
    loss = Weighted(x.sum(), jnp.float32(x.shape[0]))
    shown = {
        "bias": Sum(weights[0]["bias"].astype(jnp.float32).sum()),
        "left": Max(jnp.float32(is_left_over)),
        "step": Max(inputs.step.value.astype(jnp.float32)),
    }
    return Sums(loss, shown)


def program_of(engine: jaxpar.Engine, checks: Any = None) -> Program:
    given = engine.placement, engine.spec, engine.batch_spec
    step = TrainStep(lambda _, batch: batch, counted, lambda state, _: state)
    jitted = make_step_program(*given, step, Focus())
    checks = checks or {"loss_fn": NoCheck()}
    return make_program(engine.placement, jitted, summed, checks)


@pytest.fixture(scope="module")
def engine():
    return make_engine()


def test_step_donates_the_state_and_stores_it_where_it_was(engine):
    leaves = jax.tree.leaves(jax.tree.map(jnp.copy, engine.state))
    placed = engine.batch_spec.put(BATCH)
    after, metrics, exhausted = program_of(engine).step(leaves, placed)
    shardings = jax.tree.leaves(engine.placement.packed_shardings)
    for leaf, sharding in zip(after, shardings, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert leaves[1].is_deleted()
    assert not placed["x"].is_deleted()
    assert float(metrics["sum"]) == BATCH["x"].sum()
    assert metrics["sum"].sharding == NamedSharding(engine.mesh, P())
    assert exhausted == []


def test_step_of_a_scaled_loss_returns_its_flag():
    engine = make_engine(precision="fp16")
    leaves = jax.tree.leaves(engine.state)
    _, _, exhausted = program_of(engine).step(leaves, engine.batch_spec.put(BATCH))
    assert [bool(flag) for flag in exhausted] == [False]


def test_evaluation_joins_its_parts_by_weight(engine):
    """Five rows: four over data, and one that is left over."""
    parts = engine.batch_spec.put_any({"x": BATCH["x"][:5]}, whole=False)
    state = engine.state
    got = program_of(engine).evaluated(parts, state.params, state, is_packed=True)
    assert float(got["loss"]) == BATCH["x"][:5].sum() / 5
    assert (float(got["weight"]), float(got["left"])) == (5, 1)


def test_evaluation_of_rows_that_data_divides_has_no_left_over_part(engine):
    parts = engine.batch_spec.put_any(BATCH, whole=False)
    state = dataclasses.replace(engine.state, step=jnp.int32(6))
    got = program_of(engine).evaluated(parts, state.params, state, is_packed=True)
    assert (float(got["left"]), float(got["step"])) == (0, 6)
    assert float(got["weight"]) == len(BATCH["x"])


def test_packed_parameters_are_unpacked_and_logical_ones_are_not():
    engine = make_engine(optimizer=fused_adamw(1e-3), precision="bf16")
    program, state = program_of(engine), engine._packed
    parts = engine.batch_spec.put_any(BATCH, whole=False)
    stored = program.evaluated(parts, state.params, state, is_packed=True)
    assert float(stored["bias"]) == 0
    logical = engine.state.params | {"bias": jnp.full(8, 3.0)}
    given = program.evaluated(parts, logical, state, is_packed=False)
    assert float(given["bias"]) == 24


def test_check_of_the_evaluation_is_none_unless_it_is_given(engine):
    loss, evaluation = NoCheck(), NoCheck()
    assert type(program_of(engine, {"loss_fn": loss}).eval_check) is NoCheck
    both = program_of(engine, {"loss_fn": loss, "eval_fn": evaluation})
    assert both.loss_check is loss
    assert both.eval_check is evaluation


def test_several_processes_wait_between_the_parts(engine, monkeypatch):
    """Two programs' collectives must not mix among processes."""
    waited = []
    program = program_of(engine)
    parts = engine.batch_spec.put_any({"x": BATCH["x"][:5]}, whole=False)
    state = engine.state
    own = importlib.import_module("jaxpar.engine.program").jax
    monkeypatch.setattr(own, "process_count", lambda: 2)
    monkeypatch.setattr(own, "block_until_ready", lambda sums: waited.append(len(sums)))
    program.evaluated(parts, state.params, state, is_packed=True)
    assert waited == [0, 1]
