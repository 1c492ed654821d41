"""Does 1-bit Adam send 1/32 of fp32's bytes, on 64 H200s?"""

import pytest

from tests.compiled.onebit import compile_onebit


@pytest.mark.parametrize(
    ("tensor", "zero"),
    [(1, 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in [(4, 1), (1, 2)])],
)
def test_signs_are_a_thirtysecond_of_fp32(tensor: int, zero: int, compiled) -> None:
    step = compiled(compile_onebit, tensor, zero)
    # Both exchanges are of as many bytes; an all-reduce counts as two.
    assert step.exchanged == pytest.approx(4 * step.psi / 32, rel=3e-2)
    # A momentum and a worker's error, whole; a server's of a chunk.
    assert step.carried == pytest.approx(8 * step.psi, rel=3e-2 + tensor / 16)
