"""How often is a branch taken: what a program does not say, its author may.

A conditional's predicate is known when it runs. A named scope around it reaches the
jaxpr and the compiled program, where costs are counted.
"""

import contextlib
import re

import jax

_MARK = "jaxpar_taken_"
_FRACTION = re.compile(_MARK + r"(\d*\.?\d+(?:e-\d+)?)")


def expected(fraction: float) -> contextlib.AbstractContextManager:
    """Say of the conditionals traced in this block how often they do their work.

    Args:
      fraction: of the times that one runs, those in which it takes the costlier branch.

    Returns:
      A named scope.

    Raises:
      ValueError: if the fraction is not between 0 and 1.

    Example:
      >>> def half(x):
      ...     with expected(0.5):
      ...         return jax.lax.cond(x > 0, lambda: x * 2, lambda: x)
      >>> fraction_in(str(jax.make_jaxpr(half)(1.0).eqns[-1].source_info.name_stack))
      0.5
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"expected: fraction={fraction} must be between 0 and 1.")
    return jax.named_scope(f"{_MARK}{fraction:.4g}")


def fraction_in(scope: str) -> float | None:
    """Read what `expected` said.

    Args:
      scope: the scopes in which a conditional stands, or its name in HLO.

    Returns:
      The fraction; None where nothing was said. What was said of a conditional around
      this one does not count.
    """
    found = _FRACTION.findall(scope.rsplit("/branch_", 1)[-1])
    return float(found[-1]) if found else None
