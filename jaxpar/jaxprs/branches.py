"""How often is a branch taken, or a loop run? What a program does not say, authors may.

A conditional's predicate is known when it runs, and so is a loop's number of turns. A
named scope around them reaches the jaxpr and the compiled program, where costs are
counted; a name of the predicate says that all devices take the same branch.
"""

import contextlib
import re

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

_MARK = "jaxpar_taken_"
_ALIKE = "jaxpar_alike_on_all_devices"
_NUMBER = r"\d*\.?\d+(?:e-\d+)?"
_FRACTION = re.compile(f"{_MARK}({_NUMBER}(?:_{_NUMBER})*)")
_TURNS_MARK = "jaxpar_turns_"
_TURNS = re.compile(rf"{_TURNS_MARK}({_NUMBER})\)*(?:/while)?$")


def expected(*fractions: float) -> contextlib.AbstractContextManager:
    """Say of the conditionals traced in this block how often they do their work.

    Args:
      *fractions: of the times that one runs, those in which it takes the costlier
        branch; or several, by branch.

    Returns:
      A named scope.

    Raises:
      ValueError: if a fraction is not between 0 and 1.

    Example:
      >>> def half(x):
      ...     with expected(0.5):
      ...         return jax.lax.cond(x > 0, lambda: x * 2, lambda: x)
      >>> fraction_in(str(jax.make_jaxpr(half)(1.0).eqns[-1].source_info.name_stack))
      0.5
    """
    if not all(0 <= fraction <= 1 for fraction in fractions):
        raise ValueError(f"expected: fractions={fractions} must be between 0 and 1.")
    return jax.named_scope(_MARK + "_".join(f"{x:.4g}" for x in fractions))


def fraction_in(scope: str) -> float | None:
    """Read what `expected` said.

    Args:
      scope: the scopes in which a conditional stands, or its name in HLO.

    Returns:
      The fraction, of several the largest; None where nothing was said. What was said
      of a conditional around this one does not count.
    """
    found = fractions_in(scope)
    return max(found) if found else None


def fractions_in(scope: str) -> tuple[float, ...]:
    """All that `expected` said, as of `fraction_in`; none where nothing was said."""
    found = _FRACTION.findall(scope.rsplit("/branch_", 1)[-1])
    return tuple(map(float, found[-1].split("_"))) if found else ()


def without_fraction(scope: str) -> str:
    """Scopes without what `expected` said."""
    return "/".join(part for part in scope.split("/") if not _FRACTION.search(part))


def expected_turns(turns: float) -> contextlib.AbstractContextManager:
    """Say of the while loop traced in this block how often its body runs.

    Args:
      turns: on average, at least 0.

    Returns:
      A named scope.

    Example:
      >>> def doubled(x, times):
      ...     with expected_turns(2.5):
      ...         return jax.lax.fori_loop(0, times, lambda _, x: 2 * x, x)
      >>> turns_in(str(jax.make_jaxpr(doubled)(1.0, 3).eqns[-1].source_info.name_stack))
      2.5
    """
    return jax.named_scope(f"{_TURNS_MARK}{turns:.6g}")


def turns_in(scope: str) -> float | None:
    """Read what `expected_turns` said.

    Args:
      scope: the scopes in which a loop stands, or its name in HLO.

    Returns:
      The turns; None where nothing was said of this loop.
    """
    found = _TURNS.search(scope)
    return float(found.group(1)) if found else None


def alike_on_all_devices(predicate: jax.Array) -> jax.Array:
    """Say that all devices take the same branch of the conditional of a predicate."""
    return checkpoint_name(predicate, _ALIKE)


def conditionals_alike(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """The conditionals whose predicates are `alike_on_all_devices`."""
    named: set[core.Var] = set()
    found = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        given = [x for x in eqn.invars if isinstance(x, core.Var) and x in named]
        if name == "cond" and eqn.invars[0] in given:
            found.append(eqn)
        is_named = name == "name" and eqn.params["name"] == _ALIKE
        # What `jax.lax.cond` and `switch` make of a predicate.
        if is_named or (given and name in ("convert_element_type", "clamp")):
            named.update(eqn.outvars)
    return found
