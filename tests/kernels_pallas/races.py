"""Do kernels race, in Mosaic's CPU interpreter?"""

from collections.abc import Callable
from typing import Any

import jax


def watched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Look for races behind each call: the next kernel's record takes the place of its.

    Args:
      kernel: a function that runs one kernel.
    """

    def run(*args: Any, **options: Any) -> Any:
        found = jax.block_until_ready(kernel(*args, **options))
        told = getattr(args[0], "__name__", kernel.__name__)
        assert not _races_found(), f"{told} races"
        return found

    return run


def _races_found() -> bool:
    # TODO(jax>=0.13): there is no public way yet.
    from jax._src.pallas.mosaic_gpu.interpret import (  # noqa: PLC0415
        interpret_pallas_call,
    )

    return interpret_pallas_call.get_races().races_found
