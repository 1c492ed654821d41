"""Are gradients sent in the bits that reductions say, on 64 H200s?"""

import pytest

from jaxpar.optim import ZeroPlusPlus
from tests.compiled.own_reductions import (
    compile_onebit,
    compile_plus,
    compile_quantized,
)


@pytest.mark.parametrize(
    ("tensor", "zero"),
    [
        pytest.param(1, 1, marks=pytest.mark.thorough),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in [(4, 1), (1, 2)]),
    ],
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


@pytest.mark.thorough
def test_between_hosts_zero_plus_plus_sends_a_quarter(compiled) -> None:
    """Of what ZeRO 3 over all devices sends, all of which crosses hosts."""
    plus = ZeroPlusPlus(3, gradient_bits=4, secondary=True)
    found, plain = compiled(compile_plus, plus), compiled(compile_plus, None)
    between, whole = sum(found["replica"].values()), sum(plain["data"].values())
    assert 4 * between < whole
    # Parameters in 8 bits, gathered in both passes, are about half of bf16's.
    gathered = found["data"]["all-gather"] / plain["data"]["all-gather"]
    assert gathered == pytest.approx((1 + 4 / 256) / 2, rel=0.1)
