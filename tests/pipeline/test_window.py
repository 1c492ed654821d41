"""Has a micro-batch of a window the rows, the step and the key of its own batch?"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.pipeline.window import Window, WindowKey
from jaxpar.step.inputs import make_inputs, microbatch_rows
from jaxpar.step.row_draws import ShardKey

ROWS, M = 12, 3
BATCHES = np.arange(2 * ROWS).reshape(2, ROWS, 1)


def test_rows_and_step_are_those_of_the_batch_alone():
    window = Window(jnp.asarray(BATCHES), jnp.asarray([7, 8]))
    for index in range(2 * M):
        batch, own = divmod(index, M)
        alone = make_inputs(jnp.asarray(BATCHES[batch]), jnp.int32(7 + batch))
        right = microbatch_rows(alone, own, M)
        found = window.microbatch(jnp.int32(index), M)
        np.testing.assert_array_equal(found.batch, right.batch)
        assert int(found.step.value) == 7 + batch


def test_key_is_that_of_the_batch_alone():
    keys = jax.random.split(jax.random.key(0))
    window = WindowKey(keys, jnp.int32(1), accumulate=M)
    for index in range(2 * M):
        batch, own = divmod(index, M)
        right = ShardKey(keys[batch], jnp.int32(1)).fold_in(own)
        found = window.fold_in(jnp.int32(index))
        assert found.key == right.key
        assert found.step_key == right.step_key
        assert int(found.microbatch) == own
