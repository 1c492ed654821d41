"""Are a section's parameters and state stacked, each block's from its own key?"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.model.toys import BATCHES, WIDTH, Block, loss_fn, make_model

KEYS = jax.random.split(jax.random.key(1), 3)


class Vectors(Block):
    """A block with state: a random vector, and a count."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.u = nnx.Variable(jax.random.normal(rngs.params(), (WIDTH,)))
        self.calls = nnx.Variable(jnp.int32(0))


def section_of(block):
    (section,) = make_model(block=block).make_network(loss_fn, BATCHES[0]).sections
    return section


def test_blocks_of_one_part_have_their_own_state():
    params, state = jax.jit(section_of(Vectors).init)(KEYS)
    own = jax.jit(section_of(Vectors).blocks[0].init)(KEYS[1])
    for stacked, alone in zip(
        jax.tree.leaves((params, state)), jax.tree.leaves(own), strict=True
    ):
        np.testing.assert_allclose(stacked[1], alone, rtol=1e-6)
    assert state["calls"].dtype == jnp.int32
    assert len(np.unique(np.asarray(state["u"]))) == 3 * WIDTH


def test_listed_blocks_are_stacked_with_their_state():
    class Other(Vectors):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.calls = nnx.Variable(jnp.int32(7))

    section = section_of([Vectors, Other, Vectors])
    params, state = jax.jit(section.init)(KEYS)
    assert state["calls"].tolist() == [0, 7, 0]
    assert params["up"]["kernel"].shape[0] == 3


def test_section_without_state_has_none():
    assert section_of(Block).init(KEYS)[1] == {}
