"""Do a schedule's ticks add up to the plain model's loss and gradients?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.pipeline.chunks import Chunks
from jaxpar.pipeline.executor import run_forwards, run_schedule
from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.pipeline.tick_table import make_tick_table
from tests.model.toys import TIE, make_mesh
from tests.pipeline.parts import (
    ACCUMULATE,
    INPUTS,
    KEY,
    make_functions,
    make_params,
    plain_total,
)

SCALE = 8.0
PARAMS = make_params(2)


def run(name: str, tied: tuple = ()):
    """Gradients and sums of both micro-batches, on two stages."""
    functions = make_functions(num_blocks=2, stages=2, tied=tied)
    schedule = make_schedule(name, 2, ACCUMULATE)
    chunks = Chunks(functions, keeps=False, splits=schedule.splits_backward)
    table = make_tick_table(schedule, training=True)
    params = PARAMS | ({"head": {}} if tied else {})

    @jax.jit
    def both(params):
        return run_schedule(chunks, table, params, INPUTS, KEY, jnp.float32(SCALE))

    with jax.set_mesh(make_mesh(pipe=2)):
        grads, sums = both(params)
    right, right_grads = jax.jit(jax.value_and_grad(plain_total))(params)
    return grads, sums, right_grads, right


@pytest.mark.parametrize(
    ("name", "tied"),
    [pytest.param("1f1b", (), marks=pytest.mark.slow), ("zero_bubble", TIE)],
)
def test_schedule_gives_the_plain_models_gradients_times_the_scale(name, tied):
    grads, sums, right_grads, right = run(name, tied)
    assert float(sums.loss.total) == pytest.approx(float(right), rel=1e-5)
    assert float(sums.loss.weight) == len(INPUTS.batch["tokens"])
    for one, other in zip(
        jax.tree.leaves(grads), jax.tree.leaves(right_grads), strict=True
    ):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, SCALE * other, rtol=1e-4, atol=1e-4)


def test_forwards_alone_give_the_plain_models_loss():
    functions = make_functions(num_blocks=2, stages=2)
    table = make_tick_table(make_schedule("gpipe", 2, ACCUMULATE), training=False)
    chunks = Chunks(functions, keeps=False, splits=False)

    @jax.jit
    def evaluate(params):
        return run_forwards(chunks, table, params, INPUTS, KEY)

    with jax.set_mesh(make_mesh(pipe=2)):
        sums = evaluate(PARAMS)
    assert float(sums.loss.weight) == len(INPUTS.batch["tokens"])
    right = float(plain_total(PARAMS))
    assert float(sums.loss.total) == pytest.approx(right, rel=1e-5)
