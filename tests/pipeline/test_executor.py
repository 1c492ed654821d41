"""Do a schedule's ticks add up to the plain model's loss and gradients?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.pipeline import buffers
from jaxpar.pipeline.executor import run_forwards, run_schedule
from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.pipeline.schedules.interleaved import make_in_groups
from jaxpar.pipeline.schedules.table import IDLE, Schedule, check_schedule
from jaxpar.pipeline.sections import Sections
from jaxpar.pipeline.stages import divide
from jaxpar.pipeline.tick_table import make_tick_table
from jaxpar.tree import named_leaves
from tests.model import two_sections
from tests.model.toys import TIE, Block, cross_entropy, make_mesh
from tests.pipeline.parts import (
    ACCUMULATE,
    INPUTS,
    KEY,
    cut,
    functions_of,
    make_params,
    make_sections,
    microbatch,
    plain_block,
    plain_total,
)

SCALE = 8.0
PARAMS, CUT = make_params(2), cut(num_blocks=2, stages=2)


def run(name: str, tied: tuple = (), frozen: tuple = ()):
    """Gradients and sums of both micro-batches, on two stages."""
    schedule = make_schedule(name, 2, ACCUMULATE)
    splits = schedule.splits_backward
    sections = make_sections(CUT, splits=splits, tied=tied, frozen=frozen)
    table = make_tick_table(schedule, training=True)
    params = PARAMS | ({"head": {}} if tied else {})

    @jax.jit
    def both(params):
        given = sections, table, (params, {}), INPUTS, KEY, jnp.float32(SCALE)
        return run_schedule(*given)[:2]

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


@pytest.mark.parametrize(
    ("name", "tied", "frozen"),
    [
        ("gpipe", TIE, ("embed/table", "blocks/up/kernel")),
        pytest.param("1f1b", (), ("embed/table",), marks=pytest.mark.slow),
        pytest.param(
            "zero_bubble", (), ("head/table", "blocks/up/bias"), marks=pytest.mark.slow
        ),
    ],
)
def test_schedule_gives_gradients_of_trained_parameters_alone(name, tied, frozen):
    grads, _, right, _ = run(name, tied, frozen)
    found, right = named_leaves(grads), named_leaves(right)
    assert found.keys() == right.keys() - set(frozen)
    for path, grad in found.items():
        np.testing.assert_allclose(grad, SCALE * right[path], rtol=1e-4, atol=1e-4)


def test_forwards_alone_give_the_plain_models_loss():
    table = make_tick_table(make_schedule("gpipe", 2, ACCUMULATE), training=False)
    sections = make_sections(CUT)

    @jax.jit
    def evaluate(params):
        return run_forwards(sections, table, (params, {}), INPUTS, KEY)

    with jax.set_mesh(make_mesh(pipe=2)):
        sums = evaluate(PARAMS)
    assert float(sums.loss.weight) == len(INPUTS.batch["tokens"])
    right = float(plain_total(PARAMS))
    assert float(sums.loss.total) == pytest.approx(right, rel=1e-5)


def deferring_table() -> Schedule:
    """Of two chunks a stage; weight gradients are made two ticks after a backward."""
    joint = make_in_groups("own", 2, ACCUMULATE, 2)
    forward, backward = (
        np.pad(slots, ((0, 2), (0, 0), (0, 0)), constant_values=IDLE)
        for slots in (joint.forward, joint.backward)
    )
    weight = np.roll(backward, 2, axis=0)[:, :, None]
    table = dataclasses.replace(
        joint, forward=forward, backward=backward, weight=weight
    )
    check_schedule(table)
    return table


def make_two_sections(*, keeps: bool = False, splits: bool = False) -> Sections:
    functions = functions_of(two_sections.make_network())
    division = divide(two_sections.COUNTS, 2, 1)
    return Sections(functions, division, keeps=keeps, splits=splits)


def in_the_stages_order(params):
    """The last of three narrow blocks again, in the second stage's idle place."""
    places = np.array([0, 1, 2, 2])
    return params | {"narrow": jax.tree.map(lambda x: x[places], params["narrow"])}


def plain_total_of_two(params):
    """The sum over micro-batches of loss times weight, of the two sections."""
    rows = [microbatch(index) for index in range(ACCUMULATE)]
    return sum(two_sections.plain_loss(params, x) * len(x["tokens"]) for x in rows)


@pytest.mark.parametrize(
    ("keeps", "splits"),
    [
        pytest.param(False, True, marks=pytest.mark.thorough),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
)
def test_schedule_of_two_sections_gives_the_plain_models_gradients(
    keeps, splits, monkeypatch
):
    """Of wide and narrow blocks, and of the part between; bubbles may hold NaN."""
    monkeypatch.setattr(buffers, "UNUSED", float("nan"))
    sections = make_two_sections(keeps=keeps, splits=splits)
    schedule = deferring_table() if splits else make_in_groups("own", 2, ACCUMULATE, 2)
    table = make_tick_table(schedule, training=True, keeps=keeps)
    params = two_sections.make_params()

    @jax.jit
    def both(params):
        given = sections, table, (params, {}), INPUTS, KEY, jnp.float32(SCALE)
        return run_schedule(*given)[:2]

    with jax.set_mesh(make_mesh(pipe=2)):
        grads, sums = both(in_the_stages_order(params))
    right, right_grads = jax.jit(jax.value_and_grad(plain_total_of_two))(params)
    assert float(sums.loss.total) == pytest.approx(float(right), rel=1e-5)
    idle = jax.tree.map(lambda x: np.any(x[3]), grads["narrow"])
    assert not any(jax.tree.leaves(idle))
    grads["narrow"] = jax.tree.map(lambda x: x[:3], grads["narrow"])
    assert jax.tree.structure(grads) == jax.tree.structure(right_grads)
    for one, other in zip(
        jax.tree.leaves(grads), jax.tree.leaves(right_grads), strict=True
    ):
        np.testing.assert_allclose(one, SCALE * other, rtol=1e-4, atol=1e-4)


def test_forwards_of_two_sections_give_the_plain_models_loss():
    sections = make_two_sections()
    schedule = make_in_groups("own", 2, ACCUMULATE, 2)
    table = make_tick_table(schedule, training=False)
    params = two_sections.make_params()

    @jax.jit
    def evaluate(params):
        return run_forwards(sections, table, (params, {}), INPUTS, KEY)

    with jax.set_mesh(make_mesh(pipe=2)):
        sums = evaluate(in_the_stages_order(params))
    right = float(plain_total_of_two(params))
    assert float(sums.loss.total) == pytest.approx(right, rel=1e-5)


class Counting(Block):
    """Adds the number of its calls to the hidden state."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.calls = nnx.Variable(jnp.float32(0))

    def __call__(self, x, *, positions=None):
        self.calls.set_value(self.calls[...] + 1)
        return super().__call__(x, positions=positions) + self.calls[...]


def counting_total(calls: list[int]) -> float:
    """The sum of the losses' totals, if blocks were called so often before."""
    total = 0.0
    for index, before in enumerate(calls):
        rows = microbatch(index)
        x = PARAMS["embed"]["table"][rows["tokens"]]
        for layer in range(2):
            own = jax.tree.map(lambda leaf, i=layer: leaf[i], PARAMS["blocks"])
            x = plain_block(own, x) + before + 1
        logits = x @ PARAMS["head"]["table"].T
        total += float(cross_entropy(logits, rows["targets"])) * len(rows["tokens"])
    return total


def test_forwards_alone_all_see_the_same_state_and_a_step_changes_it():
    sections = make_sections(CUT, block=Counting)
    table = make_tick_table(make_schedule("gpipe", 2, ACCUMULATE), training=True)
    forwards = make_tick_table(make_schedule("gpipe", 2, ACCUMULATE), training=False)
    state = {"blocks": {"calls": jnp.array([5.0, 5.0])}}

    @jax.jit
    def both(params):
        given = (params, state), INPUTS, KEY
        alone = run_forwards(sections, forwards, *given)
        return alone, run_schedule(sections, table, *given, jnp.float32(1))[1:]

    with jax.set_mesh(make_mesh(pipe=2)):
        alone, (sums, after) = both(PARAMS)
    assert float(alone.loss.total) == pytest.approx(counting_total([5, 5]), rel=1e-5)
    assert float(sums.loss.total) == pytest.approx(counting_total([5, 6]), rel=1e-5)
    assert after["blocks"]["calls"].tolist() == [7, 7]
