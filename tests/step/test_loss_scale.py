"""Is the loss scale's trace exactly the golden one, step by step?"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.step import loss_scale
from jaxpar.step.loss_scale import init_loss_scale, update_loss_scale


@dataclasses.dataclass
class Golden:
    """The dynamic scaler in plain Python, as the golden facts state it."""

    window: int = 1000
    scale: float = 2.0**16
    left: int = 2
    iteration: int = 0
    last_overflow: int = -1
    exhausted: bool = False

    def step(self, overflow: bool) -> None:
        if overflow:
            if self.left == 1:
                self.exhausted |= self.scale <= 1.0
                self.scale = max(self.scale / 2, 1.0)
            else:
                self.left -= 1
            self.last_overflow = self.iteration
        else:
            since = self.iteration - self.last_overflow - 1
            if since > 0 and since % self.window == 0:
                self.left = 2
                self.scale *= 2
        self.iteration += 1

    def seen(self) -> tuple:
        return (
            self.scale,
            self.left,
            self.iteration,
            self.last_overflow,
            self.exhausted,
        )


def seen(state) -> tuple:
    return (
        float(state.scale),
        int(state.hysteresis),
        int(state.iteration),
        int(state.last_overflow),
        bool(state.exhausted),
    )


@functools.cache
def scan_of(window):
    """One program for each window, compiled while that window is set."""

    def step(state, overflow):
        finite = ~overflow
        new = update_loss_scale(state, finite=finite, skipped=~finite, scales_loss=True)
        return new, new

    return jax.jit(lambda state, overflows: jax.lax.scan(step, state, overflows)[1])


def traced(overflows, window=1000) -> list[tuple]:
    """The states after each step, of one compiled scan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scale, "WINDOW", window)
        states = scan_of(window)(init_loss_scale(), np.array(overflows))
    fields = (
        states.scale,
        states.hysteresis,
        states.iteration,
        states.last_overflow,
        states.exhausted,
    )
    return list(zip(*(np.asarray(field).tolist() for field in fields), strict=True))


def golden(overflows, window=1000) -> list[tuple]:
    scaler, states = Golden(window), []
    for overflow in overflows:
        scaler.step(overflow)
        states.append(scaler.seen())
    return states


def test_start_is_the_golden_one():
    assert seen(init_loss_scale()) == Golden().seen()
    assert (loss_scale.WINDOW, loss_scale.MINIMUM) == (1000, 1.0)


LENGTH = 60
"""One length, so that all examples share a program."""


@pytest.mark.parametrize("window", [1, 3])
@given(st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH))
def test_trace_with_a_short_window_is_the_golden_one(window, overflows):
    assert traced(overflows, window) == golden(overflows, window)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2500), max_size=12))
def test_trace_with_the_real_window_is_the_golden_one(steps):
    overflows = np.isin(np.arange(2501), steps).tolist()
    assert traced(overflows) == golden(overflows)


def test_window_counts_from_the_step_after_the_last_overflow():
    """No overflow: doubled at k = 1000, the 1001st step; then every 1000 steps."""
    scales = [state[0] for state in traced([False] * 2501)]
    grown = [i for i in range(1, 2501) if scales[i] != scales[i - 1]]
    assert grown == [1000, 2000]
    assert scales[-1] == 2.0**18


def test_one_overflow_is_forgiven_and_two_halve():
    states = traced([True, True, True])
    assert [state[0] for state in states] == [2.0**16, 2.0**15, 2.0**14]
    assert [state[1] for state in states] == [1, 1, 1]


def test_overflow_at_the_minimum_is_exhausted_and_stays_so():
    overflows = [True] * 18 + [False] * 2
    states = traced(overflows)
    assert states == golden(overflows)
    assert [state[0] for state in states[15:]] == [2.0, 1.0, 1.0, 1.0, 1.0]
    assert [state[4] for state in states[15:]] == [False, False, True, True, True]


def test_skipped_counts_steps_that_were_not_applied():
    state = init_loss_scale()
    for finite, applied in [(True, True), (True, False), (False, False)]:
        state = update_loss_scale(
            state,
            finite=jnp.bool_(finite),
            skipped=jnp.bool_(not applied),
            scales_loss=True,
        )
    assert int(state.skipped) == 2
    assert int(state.last_overflow) == 2


def test_without_scaling_only_the_counters_move():
    state, overflow = init_loss_scale(), jnp.bool_(False)
    after = update_loss_scale(
        state, finite=overflow, skipped=~overflow, scales_loss=False
    )
    moved = {"iteration": jnp.int32(1), "skipped": jnp.int32(1)}
    assert jax.tree.all(
        jax.tree.map(jnp.array_equal, after, dataclasses.replace(state, **moved))
    )
