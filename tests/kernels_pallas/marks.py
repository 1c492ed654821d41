"""What do tests of the kernels need?"""

import jax
import pytest

from kernels_pallas.backend import LEAST_JAX

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < LEAST_JAX,
    reason=f"the kernels need jax {'.'.join(map(str, LEAST_JAX))} or later",
)
