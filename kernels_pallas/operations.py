"""How does a traced program say what a kernel computes: by the name of a call.

Operations of matrix products are counted in jaxprs, where those of a kernel can't be
seen: a loop in it runs as often as its operands say.
"""

import re
from collections.abc import Callable
from typing import Any

import jax

_MARK = "__operations_"


def counted(call: Callable[..., Any], operations: int) -> Callable[..., Any]:
    """Have a call say in the jaxpr how many operations it is.

    Args:
      call: of arrays.
      operations: floating-point ones of its matrix products, two a multiplication.

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
    """Read the operations off the name of a jitted call; None if it tells none."""
    found = re.fullmatch(rf".*{_MARK}(\d+)", name)
    return int(found[1]) if found else None
