"""Does XLA's CPU backend compute an update in blocks as the C code does?"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.offload import xla_pass as module
from jaxpar.offload.c_code import c_code
from jaxpar.offload.native import compiled
from jaxpar.offload.xla_pass import xla_pass
from tests.offload.test_c_code import SIZE, drawn, part_of


@pytest.mark.parametrize("block", [SIZE, 64])
def test_it_computes_what_c_does(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    part = part_of(lambda x, y: x - 0.5 * jnp.sign(y), jnp.float32, jnp.bfloat16)
    x, y = drawn(0), drawn(1, jnp.bfloat16)
    runs = xla_pass(part, jnp.bfloat16), compiled(c_code(part, jnp.bfloat16))
    found = []
    for run in runs:
        new, copy = np.empty(SIZE, np.float32), np.empty(SIZE, jnp.bfloat16)
        run([x, y, new, copy], [])
        found.append((new, copy))
    (one, first), (other, second) = found
    assert np.array_equal(one, other)
    assert np.array_equal(first, second)
