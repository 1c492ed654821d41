"""Are values put, taken, sent and broadcast as NumPy would, and idle slots ignored?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.pipeline import buffers
from jaxpar.pipeline.schedules.table import IDLE
from tests.model.toys import make_mesh

P = 4
BUFFER = {"x": jnp.arange(6.0).reshape(3, 2), "n": jnp.arange(3)}
VALUE = {"x": jnp.full(2, 9.0), "n": jnp.int32(9)}


@pytest.mark.parametrize("place", [0, 2])
def test_value_is_put_in_its_place_and_taken_from_it(place):
    found = buffers.put(BUFFER, VALUE, jnp.int32(place))
    right = jax.tree.map(lambda x: np.array(x), BUFFER)
    right["x"][place], right["n"][place] = 9, 9
    jax.tree.map(np.testing.assert_array_equal, found, right)
    taken = buffers.take(found, jnp.int32(place))
    jax.tree.map(np.testing.assert_array_equal, taken, VALUE)


def test_nothing_is_put_where_a_slot_is_idle():
    found = buffers.put(BUFFER, VALUE, jnp.int32(IDLE))
    jax.tree.map(np.testing.assert_array_equal, found, BUFFER)


def test_places_are_read_before_the_value_is_written():
    places = [jnp.int32(1), jnp.int32(0)]
    there, value = buffers.take_before(BUFFER, places, VALUE)
    assert [each["n"].tolist() for each in there] == [1, 0]
    jax.tree.map(np.testing.assert_array_equal, value, VALUE)
    text = str(jax.make_jaxpr(buffers.take_before)(BUFFER, places, VALUE))
    assert text.count("optimization_barrier") == 1


def test_idle_slot_gives_the_shapes_of_a_busy_one():
    shapes = jax.eval_shape(lambda: BUFFER)
    found = buffers.unused_like(shapes)
    assert jax.eval_shape(lambda: found) == shapes
    assert not np.any(found["x"])


def test_body_gets_each_stages_own_values_and_the_shared_ones():
    own, stacks, shared = jnp.arange(4.0), jnp.arange(8.0), jnp.float32(100)

    def body(own, stacks, shared):
        assert (own.shape, stacks.shape) == ((), (2,))
        return own + shared, stacks * own

    with jax.set_mesh(make_mesh(pipe=P)):
        found = jax.jit(buffers.on_stages(body))(own, stacks, shared)
    assert found[0].tolist() == [100, 101, 102, 103]
    assert found[1].tolist() == [0, 0, 2, 3, 8, 10, 18, 21]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("stage", [0, 3])
def test_one_stages_value_is_broadcast(stage, dtype):
    """The others' values may be anything, as NaN."""
    values = np.full((P, 2), np.nan)
    values[stage] = 3.0, -5.0
    with jax.set_mesh(make_mesh(pipe=P)):
        found = jax.jit(lambda x: buffers.from_stage(x, stage, platform="cpu"))(
            jnp.asarray(values, dtype)
        )
    assert found.dtype == dtype
    assert found.tolist() == [3.0, -5.0]


def test_sent_values_arrive_in_their_places():
    """Each sends its number to the next; stage 0 gets nothing, stage 2 ignores it."""
    pairs = [(0, 1), (1, 2), (2, 3)]

    def body(own, *_):
        buffer, sent, place = own
        return buffers.arrived(pairs, buffer, sent, place), None

    own = (jnp.full((P, 2), -9.0), jnp.arange(1.0, 5.0), jnp.array([IDLE, 0, IDLE, 1]))
    with jax.set_mesh(make_mesh(pipe=P)):
        found, _ = jax.jit(buffers.on_stages(body))(own, None, None)
    assert found.tolist() == [[-9, -9], [1, -9], [-9, -9], [-9, 3]]
