"""Does a piece of work use its batch's version, and add to its batch's sums?"""

import jax.numpy as jnp
import numpy as np

from jaxpar.pipeline.versions import Corrected, OneBatch, Stashed
from jaxpar.step.loss import Sums
from jaxpar.step.weighted import Max, Weighted, of_no_examples

OLD, NEW = {"w": jnp.zeros(2)}, {"w": jnp.ones(2)}


def test_stashed_version_is_of_the_oldest_batch_forwards_and_backwards():
    own = Stashed(4, 2, 2)
    for index, right in ((0, 0.0), (3, 0.0), (4, 1.0), (7, 1.0)):
        for version in (own.forward, own.backward):
            assert float(version((NEW, OLD), jnp.int32(index))["w"][0]) == right


def test_corrected_version_is_of_backwards():
    own = Corrected(4, 2, 2)
    assert own.forward((NEW, OLD), jnp.int32(0)) is NEW
    assert own.backward((NEW, OLD), jnp.int32(0)) is OLD


def test_one_batch_has_one_version_and_one_sum():
    own, index = OneBatch(), jnp.int32(3)
    assert own.forward((NEW,), index) is own.backward((NEW,), index) is NEW
    np.testing.assert_array_equal(own.added(NEW, NEW, index)["w"], [2.0, 2.0])
    assert own.zeros(NEW)["w"].shape == (2,)


def test_results_are_added_to_their_batch():
    own = Stashed(4, 3, 2)
    zeros = own.zeros(NEW)
    assert own.zeros(NEW, axis=1)["w"].shape == (2, 2)
    added = own.added(zeros, NEW, jnp.int32(5))["w"]
    np.testing.assert_array_equal(added, [[0, 0], [1, 1]])
    # An idle slot's are zeros.
    idle = own.added(zeros, OLD, jnp.int32(-1))["w"]
    np.testing.assert_array_equal(idle, np.zeros((2, 2)))
    assert own.num_weights(4) == 12


def test_losses_are_merged_by_batch():
    def sums(total: float, most: float) -> Sums:
        loss = Weighted(jnp.float32(total), jnp.float32(1))
        return Sums(loss, {"most": Max(jnp.float32(most))})

    own = Stashed(4, 3, 2)
    found = own.no_losses(of_no_examples(sums(0.0, 0.0)))
    for index, value in ((0, 2.0), (1, 1.0), (6, 5.0)):
        found = own.merged(found, sums(value, value), jnp.int32(index))
    np.testing.assert_array_equal(found.loss.total, [3.0, 5.0])
    np.testing.assert_array_equal(found.loss.weight, [2.0, 1.0])
    np.testing.assert_array_equal(found.metrics["most"].value, [2.0, 5.0])
