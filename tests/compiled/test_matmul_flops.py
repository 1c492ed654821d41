"""Do a compiled step's kernels have the FLOPs of the closed form, 6 N a token?"""

import pytest

from jaxpar.compiled.categories import LOGITS, TRUNK
from tests.compiled.matmuls import (
    LAYERS,
    LENGTH,
    ROWS,
    VOCAB,
    WIDTH,
    flops_by_category,
)


@pytest.mark.thorough
def test_kernels_have_the_flops_of_the_closed_form(compiled) -> None:
    found = compiled(flops_by_category)
    matmuls = found.pop(TRUNK) + found.pop(LOGITS)
    params = 12 * WIDTH**2 * LAYERS + VOCAB * WIDTH
    # Sums over tokens, such as a bias's gradient, may be made by matmuls too.
    assert matmuls == pytest.approx(6 * params * ROWS * LENGTH, rel=1e-3)
    assert not any(found.values())
