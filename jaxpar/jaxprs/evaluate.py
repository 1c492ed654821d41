"""How is a traced function taken apart: evaluated by equations, its work counted."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core, source_info_util

from kernels_pallas.operations import operations_of

PLACEHOLDER = "jaxpar.planned"
"""How the names of foreign calls begin that stand for kernels in a program which is
compiled and never run; their attribute ``flops`` says what the kernels compute."""

ATTENTION_KERNEL = "block_sparse_attention_"
"""How the names of Pallas's kernels of attention for GPUs begin."""

_INNER = {"jit": "jaxpr", "pjit": "jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr"}
"""Primitives that only call a jaxpr, and the parameter that holds it."""

_VIEWS = frozenset({"reshape", "transpose", "squeeze", "convert_element_type"})
"""Primitives of which one result serves all who ask for the same."""


def bind(eqn: core.JaxprEqn, ins: Sequence[Any]) -> list[jax.Array]:
    """Evaluate one equation as it was traced: in its context, scope and source line."""
    params = eqn.primitive.get_bind_params(eqn.params)
    scope = str(eqn.source_info.name_stack)
    named = jax.named_scope(scope) if scope else contextlib.nullcontext()
    traced_at = source_info_util.user_context(eqn.source_info.traceback)
    with traced_at, named, eqn.ctx.manager:
        outs = eqn.primitive.bind(*ins, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def read(env: Mapping[Any, Any], atom: Any) -> Any:
    """A literal's value, or a variable's."""
    return atom.val if isinstance(atom, core.Literal) else env[atom]


def shape_of(atom: Any) -> jax.ShapeDtypeStruct:
    """Of an array that an equation reads or makes."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def inlined(fn: Callable[..., Any], *shapes: Any) -> core.ClosedJaxpr:
    """Trace a function to a jaxpr without calls: jits and checkpoints opened.

    Args:
      fn: takes and returns pytrees of arrays.
      *shapes: its arguments' shapes.

    Returns:
      The jaxpr. With checkpoints opened, nothing keeps the compiler from sharing what
      they compute again.
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
            # What is asked for stays in the list, for an id is free once its owner is.
            outs = views.setdefault(asked, [*bind(eqn, ins), ins])[:-1]
        elif name is None:
            outs = bind(eqn, ins)
        else:
            inner = eqn.params[name]
            if not isinstance(inner, core.ClosedJaxpr):
                inner = core.ClosedJaxpr(inner, ())
            outs = _evaluate(inner, ins, views)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(env, atom) for atom in jaxpr.outvars]


def flops(eqns: Iterable[core.JaxprEqn]) -> int:
    """Count the floating-point operations of the matrix products and convolutions.

    A multiplication and an addition are two. A foreign call counts as many as its
    attribute ``flops`` says, and a kernel of `kernels_pallas` as many as its name. A
    loop's body counts as often as a scan runs it, and once in a `while`; of a
    conditional's branches the costliest counts; what runs on every device of a manual
    mesh axis counts for each.

    Args:
      eqns: a jaxpr's equations.

    Returns:
      The operations, of all devices together.
    """
    return sum(map(_flops_of, eqns))


def _flops_of(eqn: core.JaxprEqn) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = shape_of(eqn.invars[0]).shape
        return 2 * _size(eqn.outvars[0]) * math.prod(shape[dim] for dim in contracted)
    if name == "conv_general_dilated":
        kernel = shape_of(eqn.invars[1]).shape
        outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2 * _size(eqn.outvars[0]) * math.prod(kernel) // outputs
    if name == "ffi_call":
        return int(dict(params["attributes"]).get("flops", 0))
    told = operations_of(params["name"]) if name in ("jit", "pjit") else None
    if told is not None:
        return told
    inner = [flops(closed.jaxpr.eqns) for closed in inner_jaxprs(eqn).values()]
    if name == "cond":
        return max(inner)
    if name == "shard_map":
        sizes = dict(params["mesh"].shape)
        return sum(inner) * math.prod(
            sizes[axis] for axis in params["newly_manual_axes"]
        )
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _size(var: Any) -> int:
    return math.prod(shape_of(var).shape)


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """The equations of a jaxpr, each followed by those that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn).values():
            yield from equations(inner.jaxpr)


def arrays_in(jaxpr: core.Jaxpr) -> Iterator[jax.ShapeDtypeStruct]:
    """The arrays that equations make, also in what they call."""
    for eqn in equations(jaxpr):
        yield from (shape_of(var) for var in eqn.outvars if hasattr(var.aval, "dtype"))


def inner_jaxprs(eqn: core.JaxprEqn) -> dict[str, core.ClosedJaxpr]:
    """The jaxprs that an equation calls, closed, by the parameter that has them."""
    found = {}
    for name, value in eqn.params.items():
        is_many = isinstance(value, tuple | list)
        for number, part in enumerate(value if is_many else (value,)):
            if isinstance(part, core.Jaxpr):
                part = core.ClosedJaxpr(part, ())
            if isinstance(part, core.ClosedJaxpr):
                found[f"{name}[{number}]" if is_many else name] = part
    return found
