"""Does a state in host memory take none of the device's, on H200s and TPUs?

Read from programs that XLA compiled for them.
"""

import pytest

from tests.compiled.offloaded import PIECE_MB, compile_step

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
    assert there.on_host + there.state == pytest.approx(here.state, rel=1e-2)
    assert there.copied_whole == ()
    # Three pieces of three arrays, and the shards in bf16 that are gathered from: on
    # the device they are cast as they are gathered.
    pieces, copies = 3 * 3 * PIECE_MB * 1e6, 2 * there.psi / 4
    assert there.temporaries <= here.temporaries + pieces + copies


@pytest.mark.parametrize("target", TARGETS)
def test_pieces_are_copied_beside_kernels(target, compiled):
    step = compiled(compile_step, target, 1, True)
    # Of each streamed leaf three arrays, once before its loop and once in it; and one
    # for the parameters in bf16.
    assert step.reads >= 8 * (3 + 1)
    assert step.writes >= 8 * 3
    if "h200" in target:
        assert step.beside > 0
