"""Is what is under way placed, masked and averaged as it should be?"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.pipeline.in_flight import num_places, steady_table
from jaxpar.pipeline.schedules.asynchronous import make_steady
from jaxpar.pipeline.schedules.table import IDLE

STEADY = make_steady("steady", 3, 4)


def test_micro_batch_keeps_its_place_from_step_to_step():
    """Written at its forward, or its arrival, and read at its backward."""
    everything, places, offset = jnp.array([True, True]), num_places(STEADY), 0
    held: dict[tuple[int, int], int] = {}
    for step in range(4):
        rows = steady_table(STEADY, everything, jnp.int32(offset)).rows
        rows = jax.tree.map(np.asarray, rows)
        for tick in range(4):
            for stage in range(3):
                number = 4 * step + int(rows.forward[tick, stage])
                place = int(rows.forward_place[tick, stage])
                assert held.get((stage, place)) in (None, number)
                held[stage, place] = number
            for stage in range(3):
                number = 4 * step + int(rows.backward[tick, stage])
                place = int(rows.backward_place[tick, stage])
                # The first step ends batches that no step before it began.
                assert held.pop((stage, place), number) == number or not step
            for stage in range(1, 3):
                place = int(rows.input_arrives[tick, stage])
                assert (stage, place) not in held
                sent = 4 * step + int(rows.forward[tick, stage - 1])
                held[stage, place] = sent
        offset = (offset + 4) % places


def test_work_of_batches_that_are_not_there_is_left_out():
    rows = steady_table(STEADY, jnp.array([False, True]), jnp.int32(0)).rows
    forward = np.asarray(rows.forward)
    assert (forward[STEADY.forward[..., 0] < 4] == IDLE).all()
    assert (forward[STEADY.forward[..., 0] >= 4] >= 4).all()
    assert (np.asarray(rows.embed_backward) == IDLE).all()
    none = steady_table(STEADY, jnp.array([False, False]), jnp.int32(0)).rows
    work = (none.forward, none.backward, none.embed, none.head, none.input_arrives)
    assert all((np.asarray(own) == IDLE).all() for own in work)
