"""Is a steady step of an asynchronous schedule a slice of 1F1B without a flush?"""

import numpy as np
import pytest

from jaxpar.pipeline.schedules.asynchronous import (
    PipeDream2BW,
    PipeMare,
    make_steady,
)
from jaxpar.pipeline.schedules.interleaved import make_1f1b
from jaxpar.pipeline.schedules.table import IDLE, check_schedule, cost, kept, unrolled

NUMBERS = [(2, 2), (3, 4), (4, 6), (4, 8), (4, 2), (4, 1), (3, 3), (8, 5)]


@pytest.mark.parametrize(("stages", "microbatches"), NUMBERS)
def test_steps_in_a_row_are_1f1b_of_all_their_micro_batches(stages, microbatches):
    steady = make_steady("steady", stages, microbatches)
    found, right = unrolled(steady, 4), make_1f1b(stages, 4 * microbatches)
    np.testing.assert_array_equal(found.forward, right.forward)
    np.testing.assert_array_equal(found.backward, right.backward)
    check_schedule(steady)
    long = make_1f1b(stages, 2 * stages + microbatches)
    np.testing.assert_array_equal(kept(steady).inputs, kept(long).inputs)


@pytest.mark.parametrize(("stages", "microbatches"), NUMBERS)
def test_steady_step_has_no_bubble(stages, microbatches):
    steady = make_steady("steady", stages, microbatches)
    assert steady.num_ticks == microbatches
    assert not (steady.forward == IDLE).any()
    assert not (steady.backward == IDLE).any()
    assert cost(steady).bubble == 0.0
    assert cost(make_1f1b(stages, microbatches)).bubble > 0.0
    assert steady.delay == -(-2 * (stages - 1) // microbatches)


def test_wrong_steady_step_is_found():
    steady = make_steady("steady", 3, 4)
    steady.backward[0, 0, 0] += 1
    with pytest.raises(ValueError, match="a second backward"):
        check_schedule(steady)


def test_2bw_needs_micro_batches_for_two_versions():
    assert PipeDream2BW().table(4, 6).delay == 1
    with pytest.raises(ValueError, match=r"accumulate=5.*at least 6.*'pipemare'"):
        PipeDream2BW().table(4, 5)


def test_delays_of_pipemare_are_those_of_the_ticks():
    """The mean over micro-batches of the updates between the ticks of the table."""
    stages, microbatches = 4, 3
    steady, kind = make_steady("pipemare", stages, microbatches), PipeMare()
    numbers = np.arange(stages)
    ticks = np.arange(microbatches)[:, None]
    # The step of the tick of each micro-batch of the window's oldest batch, 0.
    forward = (ticks - (2 * (stages - 1) - numbers)) // microbatches
    backward = (ticks - numbers) // microbatches
    late = (0 - forward).mean(axis=0)
    np.testing.assert_allclose(late, kind.forward_delay(numbers, steady))
    between = (backward - forward).mean(axis=0)
    np.testing.assert_allclose(between, kind.discrepancy(numbers, steady))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PipeMare(annealing_steps=-1), "annealing_steps=-1 must be at least 0"),
        (lambda: PipeMare(decay=1.0), r"decay=1.0 must be above 0 and below 1"),
        (lambda: PipeMare(decay=0.0), r"decay=0.0 must be above 0"),
        (lambda: PipeDream2BW(synchronous_steps=-2), "synchronous_steps=-2 must be"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
