"""How does a host compute an update without a C compiler: by XLA's CPU backend.

It takes several times as long (benchmarks/cpu_update.py): blocks are copied in and out.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpar.jaxprs.by_element import ByElement
from jaxpar.offload.native import Pass

_BLOCK = 1 << 18
"""Elements of a block: what is read and made of them fits a core's cache."""


def xla_pass(part: ByElement, copy_dtype: Any | None) -> Pass:
    """A part as a function of NumPy arrays, compiled for the host's CPU.

    Args:
      part: an elementwise part of an update.
      copy_dtype: of a further output, the first one cast; None for no such output.
    """
    inputs = len(part.inputs)

    @jax.jit
    def block(pieces: Sequence[jax.Array], scalars: Sequence[jax.Array]) -> list:
        outs = part(pieces, scalars)
        return outs if copy_dtype is None else [*outs, outs[0].astype(copy_dtype)]

    def run(arrays: Sequence[np.ndarray], scalars: Sequence[np.ndarray]) -> None:
        cpu = jax.local_devices(backend="cpu")[0]
        flat = [array.reshape(-1) for array in arrays]
        given = [jax.device_put(scalar, cpu) for scalar in scalars]

        for at in range(0, flat[0].size, _BLOCK):
            own = slice(at, at + _BLOCK)
            pieces = [jax.device_put(x[own], cpu) for x in flat[:inputs]]
            made = block(pieces, given)
            for array, new in zip(flat[inputs:], made, strict=True):
                np.copyto(array[own], np.asarray(new))

    return run
