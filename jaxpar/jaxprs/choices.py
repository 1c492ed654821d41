"""Which iterations of a scan do nothing, and can that be known before it runs?

A scan over layers that leaves some out is written as one whose body is a conditional:
what does not hold passes the carry on. If the condition reads nothing of the carry it
is known of all layers before the first one runs, and a loop over the others alone does
the scan's work, forwards and backwards (`jaxpar.jaxprs.layer_loop`).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxpar.jaxprs.branches import conditionals_alike, fraction_in, without_fraction
from jaxpar.jaxprs.compat import scan_counts
from jaxpar.jaxprs.dependence import with_inputs_read
from jaxpar.jaxprs.evaluate import bind, equations, read, shape_of


@dataclasses.dataclass(frozen=True)
class ScanChoice:
    """Which iterations of a scan do something.

    Attributes:
      condition: ``(*consts, *xs) -> whether``, of one iteration.
      reads: by const and by xs, whether the condition reads it.
      passed: number of a stack that the scan returns -> number of the xs that it is
        where the condition does not hold.
      fraction: of iterations, those that do something, on average.
    """

    condition: core.ClosedJaxpr
    reads: tuple[tuple[bool, ...], tuple[bool, ...]]
    passed: Mapping[int, int]
    fraction: float

    def of_all(self, consts: Sequence[Any], xs: Sequence[Any]) -> jax.Array:
        """Whether each iteration does something: bool, [length].

        Args:
          consts: of the scan; those that the condition does not read may be anything.
          xs: likewise.
        """
        given = [
            [x for x, flag in zip(values, flags, strict=True) if flag]
            for values, flags in zip((consts, xs), self.reads, strict=True)
        ]

        def one(own: list) -> jax.Array:
            (holds,) = core.jaxpr_as_fun(self.condition)(*given[0], *own)
            return holds != 0

        return jax.vmap(one)(given[1])


def without_choice(scan: core.JaxprEqn) -> tuple[core.JaxprEqn, ScanChoice | None]:
    """Separate what a scan does from which iterations do it.

    Args:
      scan: the equation, or any other.

    Returns:
      The scan as if the condition always held, and the condition; or what was given,
      and None: the body has not one conditional that is `alike_on_all_devices`, or its
      condition reads the carry, or an iteration where it does not hold does something.
    """
    if scan.primitive.name != "scan":
        return scan, None
    closed = scan.params["jaxpr"]
    found = conditionals_alike(closed.jaxpr)
    if len(found) != 1 or len(found[0].params["branches"]) != 2:
        return scan, None
    (conditional,) = found
    num_consts, num_carry = scan_counts(scan.params)
    passed = _passed(closed.jaxpr, conditional, num_consts, num_carry)
    condition, reads = _condition(closed, conditional)
    first = num_consts + num_carry
    if passed is None or any(reads[num_consts:first]):
        return scan, None
    said = fraction_in(str(conditional.source_info.name_stack))
    choice = ScanChoice(
        condition,
        (tuple(reads[:num_consts]), tuple(reads[first:])),
        passed,
        1.0 if said is None else said,
    )
    params = {**scan.params, "jaxpr": _body(closed, conditional)}
    return scan.replace(params=params), choice


def has_choices(jaxpr: core.Jaxpr) -> bool:
    """Whether a scan chooses the iterations that do something."""
    scans = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan")
    return any(without_choice(scan)[1] is not None for scan in scans)


def _passed(
    jaxpr: core.Jaxpr, conditional: core.JaxprEqn, num_consts: int, num_carry: int
) -> dict[int, int] | None:
    """See `ScanChoice.passed`; None if an iteration would still do something."""
    skip = conditional.params["branches"][0].jaxpr
    given = dict(zip(skip.invars, conditional.invars[1:], strict=True))
    returned = dict(zip(conditional.outvars, skip.outvars, strict=True))
    first = num_consts + num_carry
    places = {id(var): place for place, var in enumerate(jaxpr.invars)}

    def place(out: Any) -> int | None:
        """Of the body's input that an output is where the condition does not hold."""
        if not isinstance(out, core.Literal) and out in returned:
            inner = returned[out]
            out = None if isinstance(inner, core.Literal) else given.get(inner)
        return places.get(id(out))

    found = [place(out) for out in jaxpr.outvars]
    if found[:num_carry] != list(range(num_consts, first)):
        return None
    stacks = [-1 if one is None else one - first for one in found[num_carry:]]
    return None if min(stacks, default=0) < 0 else dict(enumerate(stacks))


def _condition(
    closed: core.ClosedJaxpr, conditional: core.JaxprEqn
) -> tuple[core.ClosedJaxpr, list[bool]]:
    """The condition from those of the body's inputs that it reads; by input, which."""

    def condition(*args: Any) -> Any:
        found: list[Any] = []

        def note(ins: Sequence[Any]) -> list[Any]:
            found.append(ins[0])
            return [jnp.zeros(x.shape, x.dtype) for x in outs]

        _run(closed, args, conditional, note)
        return found[0]

    outs = list(map(shape_of, conditional.outvars))
    shapes = map(shape_of, closed.jaxpr.invars)
    return with_inputs_read(jax.make_jaxpr(condition)(*shapes))


def _body(closed: core.ClosedJaxpr, conditional: core.JaxprEqn) -> core.ClosedJaxpr:
    """The body as if the condition held."""
    branch = conditional.params["branches"][1]
    scope = without_fraction(str(conditional.source_info.name_stack))

    def taken(ins: Sequence[Any]) -> list[Any]:
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            return _run(branch, ins[1:])

    def body(*args: Any) -> list[Any]:
        return _run(closed, args, conditional, taken)

    return jax.make_jaxpr(body)(*map(shape_of, closed.jaxpr.invars))


def _run(
    closed: core.ClosedJaxpr,
    args: Sequence[Any],
    instead_of: core.JaxprEqn | None = None,
    rule: Callable[[Sequence[Any]], list[Any]] | None = None,
) -> list[Any]:
    """Evaluate a jaxpr, with a rule for one equation."""
    env: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(closed.jaxpr.invars, args, strict=True))
    for eqn in closed.jaxpr.eqns:
        ins = [read(env, atom) for atom in eqn.invars]
        outs = rule(ins) if rule and eqn is instead_of else bind(eqn, ins)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(env, atom) for atom in closed.jaxpr.outvars]
