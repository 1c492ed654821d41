"""Are statistics of logits the same by any pass, and are columns hidden?"""

import jax.numpy as jnp
import numpy as np

from jaxpar.losses.logits import hide_columns, in_one_pass, in_two_passes

VOCAB = 40
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 5, VOCAB)).astype(np.float32)
LOGITS[0, 0], LOGITS[1, 1, ::2], LOGITS[1, 2] = 1e4, -np.inf, -3e4


def test_statistics_of_one_pass_are_those_of_two():
    is_target = jnp.arange(VOCAB) == jnp.asarray(RNG.integers(1, 2, (2, 5, 1)))
    one, two = (each(jnp.asarray(LOGITS), is_target) for each in PASSES)
    np.testing.assert_allclose(one.norm, two.norm, rtol=1e-6)
    np.testing.assert_array_equal(one.target, two.target)
    assert np.isfinite(one.norm).all()


PASSES = in_one_pass, in_two_passes


def test_columns_behind_the_classes_are_hidden():
    logits = jnp.asarray(RNG.normal(size=(2, 5)), jnp.float32)
    found = hide_columns(logits, 3)
    np.testing.assert_array_equal(found[:, :3], logits[:, :3])
    assert (np.asarray(found[:, 3:]) < -1e8).all()
    for every in (None, 5, 9):
        assert hide_columns(logits, every) is logits
