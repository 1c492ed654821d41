"""Does an output of a traced function depend on given inputs?

The engine checks once, before compiling, that a loss's weight does not depend on the
parameters: the gradient of sum(total) / sum(weight) assumes a constant weight. It also
finds the mutable state that depends on the rows of the batch, and the parameters that a
loss has no gradient of.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

from jaxpar.jaxprs.compat import scan_counts

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr"} | {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def tainted_outputs(jaxpr: core.Jaxpr, tainted: Sequence[bool]) -> list[bool]:
    """Propagate dependence through a jaxpr.

    Calls, scans and branches are followed inside; in any other equation every output
    depends on every input.

    Args:
      jaxpr: the traced function.
      tainted: by input, whether to follow it.

    Returns:
      By output, whether it depends on a followed input.
    """
    env = dict(zip(jaxpr.invars, tainted, strict=True))

    def read(atom) -> bool:
        return not isinstance(atom, core.Literal) and env.get(atom, False)

    for eqn in jaxpr.eqns:
        ins = [read(atom) for atom in eqn.invars]
        outs = _through(eqn, ins) if any(ins) else [False] * len(eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def of_outputs(jaxpr: core.Jaxpr, wanted: Collection[int]) -> core.Jaxpr:
    """A jaxpr of some outputs alone, without what only the others need."""
    used = [number in wanted for number in range(len(jaxpr.outvars))]
    return partial_eval.dce_jaxpr(jaxpr, used)[0]


def with_inputs_read(closed: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, list[bool]]:
    """A jaxpr of the inputs that its outputs need alone; and by input, whether one is.

    Example:
      >>> import jax
      >>> closed = jax.make_jaxpr(lambda x, y, z: x + z)(1.0, 2.0, 3.0)
      >>> made, needed = with_inputs_read(closed)
      >>> needed, float(core.jaxpr_as_fun(made)(1.0, 3.0)[0])
      ([True, False, True], 4.0)
    """
    jaxpr, read = partial_eval.dce_jaxpr(closed.jaxpr, True)
    return core.ClosedJaxpr(jaxpr, closed.consts), read


def of_first_inputs(
    closed: core.ClosedJaxpr, count: int
) -> tuple[list[int], core.ClosedJaxpr]:
    """The outputs that are computed from the first inputs alone.

    Args:
      closed: the traced function.
      count: of the first inputs.

    Returns:
      Their numbers; and the jaxpr from the first inputs to these outputs.

    Example:
      >>> import jax
      >>> closed = jax.make_jaxpr(lambda x, y: (x * y, x + 1.0, y))(2.0, 3.0)
      >>> numbers, made = of_first_inputs(closed, 1)
      >>> numbers, [float(x) for x in core.jaxpr_as_fun(made)(2.0)]
      ([1], [3.0])
    """
    jaxpr = closed.jaxpr
    is_first = [number < count for number in range(len(jaxpr.invars))]

    def of(wanted: Collection[int]) -> tuple[core.Jaxpr, list[bool]]:
        used = [number in wanted for number in range(len(jaxpr.outvars))]
        return partial_eval.dce_jaxpr(jaxpr, used, is_first)

    tainted = tainted_outputs(jaxpr, [not first for first in is_first])
    # An output of a custom derivative's call needs all inputs of the call.
    found = [
        n for n, taint in enumerate(tainted) if not taint and of([n])[1] == is_first
    ]
    return found, core.ClosedJaxpr(of(found)[0], closed.consts)


def differentiable_inputs(jaxpr: core.Jaxpr, output: int) -> list[bool]:
    """Find the inputs that an output may have a gradient of.

    Calls, scans and branches are followed inside; in any other equation every floating
    output has a gradient of every input, but for `jax.lax.stop_gradient`.

    Args:
      jaxpr: the traced function.
      output: the number of the output.

    Returns:
      By input; False where the gradient is zero by structure.
    """
    wanted = [number == output for number in range(len(jaxpr.outvars))]
    return _back_through(jaxpr, wanted)


def _back_through(jaxpr: core.Jaxpr, wanted: Sequence[bool]) -> list[bool]:
    """By input, whether a wanted output may have a gradient of it."""
    reached: set[core.Var] = set()

    def reach(atoms: Sequence[Any], flags: Sequence[bool]) -> None:
        for atom, flag in zip(atoms, flags, strict=True):
            if flag and not isinstance(atom, core.Literal):
                reached.add(atom)

    reach(jaxpr.outvars, wanted)
    for eqn in reversed(jaxpr.eqns):
        outs = [
            var in reached and jnp.issubdtype(_dtype(var), jnp.inexact)
            for var in eqn.outvars
        ]
        if any(outs):
            reach(eqn.invars, _back(eqn, outs))
    return [var in reached for var in jaxpr.invars]


def _back(eqn: core.JaxprEqn, outs: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    if name == "stop_gradient":
        return [False] * len(eqn.invars)
    if name in _CALLS:
        return _back_through(_open(eqn.params[_CALLS[name]]), outs)
    if name == "scan":
        return _back_through_scan(eqn, outs)
    if name == "cond":
        found = [_back_through(b.jaxpr, outs) for b in eqn.params["branches"]]
        return [False, *(any(flags) for flags in zip(*found, strict=True))]
    return [True] * len(eqn.invars)


def _back_through_scan(eqn: core.JaxprEqn, outs: list[bool]) -> list[bool]:
    num_consts, num_carry = scan_counts(eqn.params)
    carry, ys = outs[:num_carry], outs[num_carry:]
    while True:
        ins = _back_through(eqn.params["jaxpr"].jaxpr, [*carry, *ys])
        before = ins[num_consts : num_consts + num_carry]
        grown = [a or b for a, b in zip(carry, before, strict=True)]
        if grown == carry:
            return [*ins[:num_consts], *carry, *ins[num_consts + num_carry :]]
        carry = grown


def _through(eqn: core.JaxprEqn, ins: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    if name in _CALLS:
        return tainted_outputs(_open(eqn.params[_CALLS[name]]), ins)
    if name == "scan":
        return _through_scan(eqn, ins)
    if name == "cond" and not ins[0]:
        branches = [tainted_outputs(b.jaxpr, ins[1:]) for b in eqn.params["branches"]]
        return [any(outs) for outs in zip(*branches, strict=True)]
    return [True] * len(eqn.outvars)


def _through_scan(eqn: core.JaxprEqn, ins: list[bool]) -> list[bool]:
    num_consts, num_carry = scan_counts(eqn.params)
    consts, xs = ins[:num_consts], ins[num_consts + num_carry :]
    carry = ins[num_consts : num_consts + num_carry]
    while True:
        outs = tainted_outputs(eqn.params["jaxpr"].jaxpr, [*consts, *carry, *xs])
        grown = [a or b for a, b in zip(carry, outs[:num_carry], strict=True)]
        if grown == carry:
            return [*carry, *outs[num_carry:]]
        carry = grown


def _dtype(var: core.Var) -> Any:
    return getattr(var.aval, "dtype", None)  # A token has none.


def _open(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
