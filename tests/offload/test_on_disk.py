"""Do compiled functions skip what stands for a leaf on disk?"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.offload.on_disk import OnDisk, flat_leaves, is_on_disk, is_traced, shapes_of

AWAY = OnDisk((2, 3), np.dtype(np.float32))


def test_it_has_no_leaves_and_stays_where_it_is() -> None:
    state = {"a": jnp.ones(2), "b": AWAY}
    assert len(jax.tree.leaves(state)) == 1
    made = jax.jit(lambda x: jax.tree.map(lambda y: 2 * y, x))(state)
    assert made["b"] == AWAY
    assert [is_on_disk(leaf) for leaf in flat_leaves(state)] == [False, True]


def test_shapes_are_those_of_the_leaf() -> None:
    shapes = shapes_of({"a": jnp.ones(2), "b": AWAY})
    assert [x.shape for x in shapes.values()] == [(2,), (2, 3)]


def test_traced_values_are_told_from_arrays() -> None:
    seen = []
    jax.eval_shape(lambda x: seen.append(is_traced([x])) or x, jnp.ones(2))
    jax.eval_shape(lambda: seen.append(is_traced(AWAY)))
    assert seen.pop(), "all leaves are on disk"
    assert [*seen, is_traced([jnp.ones(2)]), is_traced(AWAY)] == [True, False, False]
