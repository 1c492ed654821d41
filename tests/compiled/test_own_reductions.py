"""Are gradients sent in the bits that reductions say, on 64 H200s?"""

import pytest

from tests.compiled.own_reductions import compile_onebit, compile_quantized


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


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "tensor", "zero"), [(8, 1, 1), (4, 1, 2), (4, 4, 1)])
def test_codes_and_scales_are_sent(bits, tensor, zero, compiled) -> None:
    step = compiled(compile_quantized, bits, tensor, zero)
    # A scale for 256 elements; blocks of small leaves are padded.
    assert step.exchanged == pytest.approx(
        step.psi * (bits / 8 + 4 / 256), rel=0.1 * tensor
    )
    assert step.carried == pytest.approx(4 * step.psi, rel=3e-2)
