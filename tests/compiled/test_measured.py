"""Are a step's bytes those of its program, with the leaf that causes them?"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.compiled.explain import LeafReport
from jaxpar.compiled.hlo import parse
from jaxpar.compiled.measured import Measured, join_measured, measure
from jaxpar.compiled.source_lines import Operation

IN, OUT = 128, 256


def make_engine() -> jaxpar.Engine:
    return jaxpar.initialize(
        model=lambda rngs: nnx.Linear(IN, OUT, rngs=rngs),
        loss_fn=lambda model, batch: jnp.mean(model(batch) ** 2),
        optimizer=optax.adam(1e-3),
        sample_batch=np.ones((8, IN), np.float32),
        mesh=jaxpar.MeshShape(data=8),
    )


def test_bytes_of_leaves_are_those_of_the_program():
    """Not those that were asked for."""
    engine = make_engine()
    compiled = engine.lower().compile()
    text = compiled.as_text()
    explanation = engine.explain()
    wrong = tuple(
        dataclasses.replace(leaf, bytes_per_device=7) for leaf in explanation.leaves
    )
    explanation = dataclasses.replace(explanation, leaves=wrong)
    step = measure(explanation, parse(text), text, on_cpu=True)
    assert step.state_bytes == compiled.memory_analysis().alias_size_in_bytes
    assert {leaf.name: leaf.bytes_per_device for leaf in step.leaves}[
        "params/kernel"
    ] == IN * OUT * 4 // 8


GATHERED_ARGUMENT = """\
ENTRY %main (p: f32[8]) -> f32[32] {
  %p = f32[8]{0} parameter(0), metadata={op_name="state[0]"}
  ROOT %g = f32[32]{0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}, \
metadata={op_name="state[0]"}
}
"""


def test_gather_of_a_leaf_as_it_rests_is_named_by_the_leaf():
    mesh = {"data": 4, "pipe": 1, "tensor": 1}
    leaf = LeafReport("params/w", (64,), "float32", "('data',)", 0, 0, "")
    explanation = make_engine().explain()
    explanation = dataclasses.replace(explanation, mesh=mesh, leaves=(leaf,))
    module = parse(GATHERED_ARGUMENT)
    step = measure(explanation, module, GATHERED_ARGUMENT, on_cpu=True)
    assert [found.name for found in step.operations] == ["params/w"]
    assert step.state_bytes == 32


@pytest.mark.parametrize("second", [True, False])
def test_joined_programs_are_complete_if_all_are(second):
    reduced = Operation("all-reduce", ("data",), "f32[8]", 1, 1, 32, "dot", "a.py:1")
    first = Measured({"data": 8}, (), (reduced,), 10, on_cpu=False)
    joined = join_measured([first, dataclasses.replace(first, is_complete=second)])
    assert joined.is_complete == second
    assert joined.communicated == {"data": {"all-reduce": 64}}


def test_program_with_a_loop_of_unknown_length_is_not_complete():
    explanation = make_engine().explain()
    text = make_engine().lower().compile().as_text()
    assert measure(explanation, parse(text), text, on_cpu=True).is_complete
    program = dataclasses.replace(explanation.program, unknown_loops=("while",))
    unknown = dataclasses.replace(explanation, program=program)
    assert not measure(unknown, parse(text), text, on_cpu=True).is_complete
