"""Are slices of stacks read and written where they are, keys too?"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.jaxprs.stacks import at, data_of, empty, from_data, written

DEVICE = jax.memory.Space.Device


def test_a_slice_is_read_where_it_was_written() -> None:
    stack = empty((3, 2), jnp.float32, DEVICE, 7)
    assert not stack.any()
    (stack,) = written([stack], [jnp.ones(2)], 1)
    np.testing.assert_array_equal(stack.sum(1), [0, 2, 0])
    assert at({"a": stack}, 1)["a"].tolist() == [1, 1]


def test_keys_are_stacked_as_data() -> None:
    tree = {"key": jax.random.key(3), "x": jnp.float32(2)}
    data, how = data_of(tree)
    assert all(jnp.issubdtype(x.dtype, jnp.number) for x in data)
    again = from_data(data, *how)
    assert again["key"] == tree["key"]
    assert again["x"] == 2
