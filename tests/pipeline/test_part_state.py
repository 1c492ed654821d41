"""Is mutable state where the stages' blocks are, and then where it was?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.pipeline.part_state import (
    of_all_stages,
    on_each_stage,
    staged_state,
    stored_state,
)
from jaxpar.pipeline.stages import divide
from tests.model.toys import make_mesh

NAMES = (("wide", "narrow"), ("joint",))


def make_state(wide: int, narrow: int) -> dict:
    return {
        "embed": {"calls": jnp.int32(5)},
        "wide": {"u": 1.0 * jnp.arange(2 * wide).reshape(wide, 2)},
        "joint": {"size": jnp.float32(3)},
        "narrow": {"calls": jnp.arange(narrow)},
    }


@pytest.mark.parametrize(
    ("counts", "chunks", "order"),
    [
        ((4, 2), 1, {"wide": [0, 1, 2, 3], "narrow": [0, 1]}),
        # Of two chunks a stage the first has blocks 0 and 2. An idle place has a copy.
        ((4, 3), 2, {"wide": [0, 2, 1, 3], "narrow": [0, 1, 2, 2]}),
    ],
)
def test_state_is_in_the_order_of_the_stages_and_back(counts, chunks, order):
    state = make_state(*counts)
    division = divide(dict(zip(NAMES[0], counts, strict=True)), 2, chunks)

    @jax.jit
    def there_and_back(state):
        staged = staged_state(division, state)
        held = on_each_stage(staged, NAMES, 2)
        again = of_all_stages(held, NAMES, 2, lambda x: jax.tree.map(lambda y: y[0], x))
        return staged, held, stored_state(division, {**again, "embed": state["embed"]})

    with jax.set_mesh(make_mesh(pipe=2)):
        staged, held, back = there_and_back(state)
    for name, places in order.items():
        (leaf,), (own,) = jax.tree.leaves(state[name]), jax.tree.leaves(staged[name])
        np.testing.assert_array_equal(own, np.asarray(leaf)[np.array(places)])
        (own,) = jax.tree.leaves(held[name])
        assert own.shape == (2, len(places) // 2, *leaf.shape[1:])
        assert own.sharding.spec[0] == "pipe"
    assert held.keys() == {"wide", "narrow", "joint"}
    np.testing.assert_array_equal(held["joint"]["size"], np.full(2, 3.0))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)
