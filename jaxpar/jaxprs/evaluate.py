"""How is a jaxpr evaluated equation by equation, and how are its FLOPs counted?"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core, source_info_util

from jaxpar.jaxprs.branches import fraction_in, turns_in
from kernels_pallas.operations import operations_of

PLACEHOLDER = "jaxpar.planned"
"""Prefix of the names of foreign calls that stand for kernels in a program which is
compiled and never run; their attribute ``flops`` holds the kernels' FLOPs."""

ATTENTION_KERNEL = "block_sparse_attention_"
"""Prefix of the names of the Pallas attention kernels for GPUs."""

_INNER = {"jit": "jaxpr", "pjit": "jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr"}
"""Primitives that only call a jaxpr, and the parameter that holds it."""

_VIEWS = frozenset({"reshape", "transpose", "squeeze", "convert_element_type"})
"""Primitives whose equal equations share one result."""


def bind(eqn: core.JaxprEqn, ins: Sequence[Any]) -> list[jax.Array]:
    """Evaluate one equation with the context, scope and source line of its trace."""
    with scope_of(eqn):
        return bind_in_scope(eqn, ins)


def bind_in_scope(eqn: core.JaxprEqn, ins: Sequence[Any]) -> list[jax.Array]:
    """`bind`, within the block of `scope_of`."""
    params = eqn.primitive.get_bind_params(eqn.params)
    traced_at = source_info_util.user_context(eqn.source_info.traceback)
    with traced_at, eqn.ctx.manager:
        outs = eqn.primitive.bind(*ins, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def scope_of(eqn: core.JaxprEqn) -> contextlib.AbstractContextManager:
    """The named scope in which an equation was traced."""
    scope = str(eqn.source_info.name_stack)
    return jax.named_scope(scope) if scope else contextlib.nullcontext()


def read(env: Mapping[Any, Any], atom: Any) -> Any:
    """A literal's value, or a variable's."""
    return atom.val if isinstance(atom, core.Literal) else env[atom]


def shape_of(atom: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array that an equation reads or makes."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def inlined(fn: Callable[..., Any], *shapes: Any) -> core.ClosedJaxpr:
    """Trace a function to a jaxpr with jits and checkpoints inlined.

    Args:
      fn: takes and returns pytrees of arrays.
      *shapes: its arguments' shapes.

    Returns:
      The jaxpr. With checkpoints inlined, the compiler may merge the recomputation with
      the forward pass.
    """
    closed = jax.make_jaxpr(fn)(*shapes)
    flat = [shape_of(var) for var in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: _evaluate(closed, args, {}))(*flat)


def _evaluate(
    closed: core.ClosedJaxpr, args: Sequence[Any], views: dict[tuple, list]
) -> list[Any]:
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        ins = [read(env, atom) for atom in eqn.invars]
        name = _INNER.get(eqn.primitive.name)
        if eqn.primitive.name in _VIEWS:
            asked = (eqn.primitive.name, *map(id, ins), str(eqn.params))
            # The list holds the operands, because a freed object's id can be reused.
            outs = views.setdefault(asked, [*bind(eqn, ins), ins])[:-1]
        elif name is None:
            outs = bind(eqn, ins)
        else:
            inner = eqn.params[name]
            if not isinstance(inner, core.ClosedJaxpr):
                inner = core.ClosedJaxpr(inner, ())
            with scope_of(eqn):
                outs = _evaluate(inner, ins, views)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(env, atom) for atom in jaxpr.outvars]


def flops(
    eqns: Iterable[core.JaxprEqn], only: Callable[[core.JaxprEqn], bool] | None = None
) -> int:
    """Count the FLOPs of matmuls and convolutions.

    A multiply-add is two. A foreign call has the FLOPs of its attribute ``flops``, a
    kernel of `kernels_pallas` those in its name. A scan's body counts every iteration,
    a while loop's body once, or as often as `jaxpar.jaxprs.branches.expected_turns`
    says; of a conditional the costliest branch counts, as often as
    `jaxpar.jaxprs.branches.expected` says. A `shard_map`'s body counts once for each
    device of its manual mesh axes.

    Args:
      eqns: a jaxpr's equations.
      only: which equations count; None for all.

    Returns:
      The FLOPs of all devices together.
    """
    return sum(flops_by_scope(eqns, only=only).values())


def flops_by_scope(
    eqns: Iterable[core.JaxprEqn],
    around: str = "",
    only: Callable[[core.JaxprEqn], bool] | None = None,
) -> dict[str, int]:
    """Count `flops` by the named scopes in which they were traced.

    Args:
      eqns: a jaxpr's equations.
      around: the scopes in which the jaxpr is called.
      only: which equations count; None for all.

    Returns:
      Scope, such as "transpose(jvp(blocks))/mlp" -> FLOPs of all devices together.
    """
    found: dict[str, int] = {}
    for eqn in eqns:
        for scope, number in _flops_of(eqn, around, only).items():
            found[scope] = found.get(scope, 0) + number
    return found


def _flops_of(
    eqn: core.JaxprEqn,
    around: str,
    only: Callable[[core.JaxprEqn], bool] | None,
) -> dict[str, int]:
    own = _own_flops(eqn)
    if own == 0:
        return {}
    scope = f"{around}/{eqn.source_info.name_stack}"
    if own is not None:
        return {scope: own} if only is None or only(eqn) else {}
    name, params = eqn.primitive.name, eqn.params
    inner = [
        flops_by_scope(closed.jaxpr.eqns, scope, only)
        for closed in inner_jaxprs(eqn).values()
    ]
    times = 1.0
    if name == "cond":
        times = _fraction(eqn)
        inner = [max(inner, key=lambda branch: sum(branch.values()))]
    elif name == "shard_map":
        sizes = dict(params["mesh"].shape)
        times = math.prod(sizes[axis] for axis in params["newly_manual_axes"])
    elif name == "scan":
        times = params["length"]
    elif name == "while":
        said = turns_in(str(eqn.source_info.name_stack))
        times = 1.0 if said is None else said
    found: dict[str, int] = {}
    for part in inner:
        for inside, number in part.items():
            found[inside] = found.get(inside, 0) + round(times * number)
    return found


def _own_flops(eqn: core.JaxprEqn) -> int | None:
    """The FLOPs of an equation; None for those of the jaxprs that it calls."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = shape_of(eqn.invars[0]).shape
        return 2 * _size(eqn.outvars[0]) * math.prod(shape[dim] for dim in contracted)
    if name == "conv_general_dilated":
        kernel = shape_of(eqn.invars[1]).shape
        outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2 * _size(eqn.outvars[0]) * math.prod(kernel) // outputs
    if name == "ragged_dot_general":
        return round(_fraction(eqn) * _ragged_flops(eqn))
    if name == "ffi_call":
        return int(dict(params["attributes"]).get("flops", 0))
    known = operations_of(params["name"]) if name in ("jit", "pjit") else None
    return known if known is not None or inner_jaxprs(eqn) else 0


def _ragged_flops(eqn: core.JaxprEqn) -> int:
    """Of all rows, those beyond the groups' sizes too."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    rows, _, groups = (shape_of(var).shape for var in eqn.invars)
    # Rows that are contracted make a product for each group.
    is_sum = numbers.lhs_ragged_dimensions[0] in contracted
    size = _size(eqn.outvars[0]) // (groups[-1] if is_sum else 1)
    return 2 * size * math.prod(rows[dim] for dim in contracted)


def _fraction(eqn: core.JaxprEqn) -> float:
    """How often an equation does its work, by what was said where it was traced."""
    said = fraction_in(str(eqn.source_info.name_stack))
    return 1.0 if said is None else said


def _size(var: Any) -> int:
    return math.prod(shape_of(var).shape)


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """The equations of a jaxpr, each followed by those of the jaxprs that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn).values():
            yield from equations(inner.jaxpr)


def arrays_in(jaxpr: core.Jaxpr) -> Iterator[jax.ShapeDtypeStruct]:
    """The arrays that equations make, including those of called jaxprs."""
    for eqn in equations(jaxpr):
        yield from (shape_of(var) for var in eqn.outvars if hasattr(var.aval, "dtype"))


def inner_jaxprs(eqn: core.JaxprEqn) -> dict[str, core.ClosedJaxpr]:
    """The jaxprs that an equation calls, closed, by the name of their parameter."""
    found = {}
    for name, value in eqn.params.items():
        is_many = isinstance(value, tuple | list)
        for number, part in enumerate(value if is_many else (value,)):
            if isinstance(part, core.Jaxpr):
                part = core.ClosedJaxpr(part, ())
            if isinstance(part, core.ClosedJaxpr):
                found[f"{name}[{number}]" if is_many else name] = part
    return found
