"""Does a state in host memory take none of the device's, on H200s and TPUs?

Read from programs that XLA compiled for them.
"""

import pytest

from tests.compiled.offloaded import PIECE_MB, compile_host_computed, compile_step

TARGETS = [
    "h200:1x4",
    pytest.param("v5p:2x2x1", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("target", TARGETS)
def test_the_device_holds_three_pieces_beside_what_it_computes(target, compiled):
    zero = 1
    there = compiled(compile_step, target, zero, True)
    here = compiled(compile_step, target, zero, False)
    # Masters and two moments; vectors are small, and stay.
    assert there.on_host == pytest.approx(12 * there.psi / 4, rel=1e-2)
    # And the shards in bf16, which are kept between steps.
    kept = there.on_host + there.state - 2 * there.psi / 4
    assert kept == pytest.approx(here.state, rel=1e-2)
    assert there.copied_whole == ()
    # A group is a piece of three fp32 arrays, of the gradient and of the copy in bf16.
    assert there.temporaries <= here.temporaries + 3 * (12 + 4) / 4 * PIECE_MB * 1e6


@pytest.mark.parametrize("target", TARGETS)
def test_pieces_are_copied_beside_kernels(target, compiled):
    step = compiled(compile_step, target, 1, True)
    # Of each streamed leaf three arrays, once before its loop and once in it.
    assert step.reads >= 8 * 3
    assert step.writes >= 8 * 3
    if "h200" in target:
        assert step.beside > 0


@pytest.mark.parametrize("target", TARGETS)
def test_of_an_update_by_the_host_only_gradients_are_sent(target, compiled) -> None:
    step = compiled(compile_host_computed, target, 3)
    # In bf16; vectors are small, and stay.
    assert step.sent == pytest.approx(2 * step.psi / 4, rel=1e-2)
    # The state stays where it is: the second program has it as arguments alone.
    assert step.held == pytest.approx(12 * step.psi / 4, rel=1e-2)
    assert step.copied == ()
    # Six kernels of each layer, in the backward pass's loop.
    assert step.early >= 6
    assert step.copied_whole == ()
    if "h200" in target:
        assert step.aliased == step.held


def test_gradients_that_leave_early_take_no_room(compiled) -> None:
    """On one device, where ZeRO 1 has whole gradients until the end."""
    whole, early = (compiled(compile_host_computed, "h200:1x1", n) for n in (1, 2))
    assert (whole.early, early.early) == (0, 6)
    saved = whole.temporaries - early.temporaries
    # All but the embedding's, and a layer's that is on its way.
    assert saved >= 0.6 * 2 * early.psi
