"""How does a traced program report a kernel's FLOPs: by the name of a call.

Matmul FLOPs are counted in jaxprs, but not inside kernels: there a loop's trip count
depends on the operands.
"""

import re
from collections.abc import Callable
from typing import Any

import jax

_MARK = "__operations_"


def counted(call: Callable[..., Any], operations: int) -> Callable[..., Any]:
    """Record in the jaxpr how many FLOPs a call has.

    Args:
      call: of arrays.
      operations: FLOPs of its matmuls, two per multiplication.

    Returns:
      The call, jitted under a name that `operations_of` reads.

    Example:
      >>> jaxpr = jax.make_jaxpr(counted(lambda x: x + 1, 12))(1.0)
      >>> operations_of(jaxpr.eqns[0].params["name"])
      12
    """

    def run(*args: Any) -> Any:
        return call(*args)

    run.__name__ = f"kernel{_MARK}{operations}"
    return jax.jit(run)


def operations_of(name: str) -> int | None:
    """Read the FLOPs from the name of a jitted call; None if it has none."""
    found = re.fullmatch(rf".*{_MARK}(\d+)", name)
    return int(found[1]) if found else None
