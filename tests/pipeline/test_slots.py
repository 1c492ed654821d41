"""Are buffers as large as a schedule needs, and are values sent to the next stage?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.pipeline.schedules.table import IDLE
from jaxpar.pipeline.slots import Buffers, Slots
from jaxpar.pipeline.tick_table import TickRows, make_tick_table
from tests.model.toys import LENGTH, ROWS, WIDTH, make_mesh
from tests.pipeline.parts import (
    ACCUMULATE,
    FIRST,
    INPUTS,
    KEY,
    cut,
    make_params,
    make_sections,
    microbatch,
    plain_block,
)

HIDDEN = ROWS // ACCUMULATE, LENGTH, WIDTH
PARAMS = make_params(2)


def make_slots(stages=2, chunks=1, *, keeps=False, splits=False, blocks=2) -> Slots:
    own = make_sections(cut(blocks, stages, chunks), keeps=keeps, splits=splits)
    params = make_params(blocks)
    blocks_alone = {"blocks": params["blocks"]}
    own = own.of_step((params, {}), INPUTS, KEY)
    return Slots(own, (blocks_alone,), {}, INPUTS, KEY)


def make_row(stages: int, **fields) -> TickRows:
    """A tick in which nothing happens but what is named."""
    slots = {"weight", "weight_chunk", "weight_place"}
    for_all = {"embed", "head", "head_place", "embed_backward"}
    row = {
        field.name: jnp.full((stages, 1) if field.name in slots else stages, IDLE)
        for field in dataclasses.fields(TickRows)
    }
    row |= dict.fromkeys(for_all, jnp.int32(IDLE))
    return TickRows(**(row | {name: jnp.asarray(x) for name, x in fields.items()}))


def shapes(buffers) -> set[tuple[int, ...]]:
    return {x.shape for x in jax.tree.leaves(buffers)}


@pytest.mark.parametrize("name", ["gpipe", "zero_bubble"])
def test_buffers_have_the_places_of_the_schedule(name):
    splits = name == "zero_bubble"
    table = make_tick_table(make_schedule(name, 2, ACCUMULATE), training=True)
    slots = make_slots(splits=splits)
    with jax.set_mesh(make_mesh(pipe=2)):
        made = jax.eval_shape(lambda: slots.empty_buffers(table, training=True))
        alone = jax.eval_shape(lambda: slots.empty_buffers(table, training=False))
    assert shapes(made.inputs) == {(2, table.num_inputs, *HIDDEN)}
    assert shapes(made.cotangents) == {(2, table.num_cotangents, *HIDDEN)}
    assert not shapes(made.kept), "backwards run their chunk again"
    assert bool(shapes(made.products)) == splits
    assert {x[:2] for x in shapes(made.products)} <= {(2, table.num_products)}
    assert shapes(alone) == shapes(made.inputs)


def test_buffers_hold_what_forwards_keep():
    table = make_tick_table(
        make_schedule("gpipe", 2, ACCUMULATE), training=True, keeps=True
    )
    slots = make_slots(keeps=True)
    with jax.set_mesh(make_mesh(pipe=2)):
        made = jax.eval_shape(lambda: slots.empty_buffers(table, training=True))
    assert {x[:2] for x in shapes(made.kept)} == {(2, table.num_kept)}


@pytest.mark.parametrize("chunks", [1, 2])
def test_activations_go_forwards_and_cotangents_back(chunks):
    """Around the ring only where a stage has several chunks; else zeros arrive."""
    slots = make_slots(chunks=chunks, blocks=2 * chunks)
    empty = jnp.full((2, 2), -1.0)
    row = make_row(2, input_arrives=[1, 0], cotangent_arrives=[0, 1])
    out, back = jnp.array([10.0, 20.0]), jnp.array([30.0, 40.0])
    with jax.set_mesh(make_mesh(pipe=2)):
        found = jax.jit(slots.send)(Buffers(empty, [], empty, []), out, back, row)
    around = [20, 30] if chunks > 1 else [0, 0]
    assert found.inputs.tolist() == [[-1, around[0]], [10, -1]]
    assert found.cotangents.tolist() == [[40, -1], [-1, around[1]]]


def test_evaluation_sends_no_cotangents():
    slots, row = make_slots(), make_row(2, input_arrives=[IDLE, 0])
    buffers = Buffers(jnp.zeros((2, 1)), [], [], [])
    with jax.set_mesh(make_mesh(pipe=2)):
        found = jax.jit(slots.send)(buffers, jnp.array([1.0, 2.0]), None, row)
    assert found.inputs.tolist() == [[0.0], [1.0]]
    assert found.cotangents == []


def test_first_stage_runs_what_entered_and_the_other_its_buffer():
    slots = make_slots()
    entered = jnp.asarray(PARAMS["embed"]["table"][microbatch(0)["tokens"]])
    there = jnp.stack([jnp.full(HIDDEN, jnp.nan), jnp.ones(HIDDEN)])[:, None]
    row = make_row(2, forward=[0, 1], forward_chunk=[0, 0], forward_place=[0, 0])
    with jax.set_mesh(make_mesh(pipe=2)):
        out, buffers = jax.jit(slots.forwards)(Buffers(there, [], [], []), entered, row)
    for stage, hidden in enumerate([entered, np.ones(HIDDEN)]):
        own = jax.tree.map(lambda x, i=stage: x[i], PARAMS["blocks"])
        right = plain_block(own, hidden)
        np.testing.assert_allclose(out[stage], right, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(buffers.inputs[0, 0], entered)


def test_gradients_are_weighed_and_idle_stages_add_nothing():
    """Micro-batch 1 weighs 3: stage 1's backward of it counts threefold."""
    slots, weights = make_slots(), jnp.array([0.0, 3.0])
    there = jnp.ones((2, 1, *HIDDEN))
    buffers = Buffers(there, [], jnp.full_like(there, jnp.nan), [])
    cotangent = jax.random.normal(jax.random.key(1), HIDDEN)
    idle_but = {"backward": [IDLE, 1], "backward_chunk": [IDLE, 0]}
    places = {"backward_place": [IDLE, 0], "cotangent_place": [IDLE, 0]}
    row = make_row(2, **idle_but, **places, head=1, head_place=FIRST)
    row = dataclasses.replace(
        row,
        **{f"weight{end}": jnp.zeros((2, 0), int) for end in ("", "_chunk", "_place")},
    )
    grads = {"blocks": jax.tree.map(jnp.ones_like, PARAMS["blocks"])}, {}
    with jax.set_mesh(make_mesh(pipe=2)):
        _, (found, between), back = jax.jit(slots.backwards)(
            buffers, grads, cotangent, weights, row
        )
    assert between == {}
    own = jax.tree.map(lambda x: x[1], PARAMS["blocks"])
    _, pull = jax.vjp(plain_block, own, jnp.ones(HIDDEN))
    right, right_back = pull(cotangent)
    np.testing.assert_allclose(back[1], right_back, rtol=1e-5, atol=1e-6)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(one[0], np.ones_like(one[0]))
        np.testing.assert_allclose(one[1], 1 + 3 * other, rtol=1e-5, atol=1e-5)
