"""Where do an optimizer's loops of matmuls run: each on one data shard.

Muon's Newton-Schulz iteration multiplies a matrix with itself. Left to the compiler,
the matrix stays sharded as it is stored, and every iteration communicates.
`with_divided_loops` instead gives each data shard some of the matrices, unsharded over
data: layers stacked in a leaf, or leaves of equal shape. They are exchanged before and
after the loops, with no communication over data in between. A matrix without others of
its shape is gathered, and every device runs its loop.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks";
Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.3.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec as P

from jaxpar.jaxprs.evaluate import bind, inlined, inner_jaxprs, read, shape_of
from jaxpar.mesh import DATA


def has_loops(jaxpr: core.Jaxpr) -> bool:
    """Whether a loop somewhere in a jaxpr multiplies matrices."""
    return any(_is_loop(eqn) or any(map(has_loops, _inner(eqn))) for eqn in jaxpr.eqns)


def with_divided_loops(fn: Callable[..., Any], ways: int) -> Callable[..., Any]:
    """Evaluate a function with its loops of matmuls divided over data.

    Args:
      fn: takes pytrees of arrays, also by name, and returns one.
      ways: data shards.

    Returns:
      The function, to be traced where data is automatic.
    """

    def run(*args: Any, **named: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args, **named)
        outs = _evaluate(closed, jax.tree.leaves((args, named)), ways)
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return run


def _evaluate(
    called: core.ClosedJaxpr, args: Sequence[Any], ways: int
) -> list[jax.Array]:
    # Inlined, so loops that users jit leaf by leaf can be compared too.
    closed = inlined(core.jaxpr_as_fun(called), *map(shape_of, called.jaxpr.invars))
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def operands(eqn: core.JaxprEqn) -> list[Any]:
        return [read(env, atom) for atom in eqn.invars]

    for loops, others in _levels(jaxpr):
        for alike in _groups(loops):
            outs = _run_loops(alike, [operands(eqn) for eqn in alike], ways)
            for eqn, own in zip(alike, outs, strict=True):
                env.update(zip(eqn.outvars, own, strict=True))
        for eqn in others:
            outs = _run_other(eqn, operands(eqn), ways)
            env.update(zip(eqn.outvars, outs, strict=True))
    return [
        jnp.asarray(read(env, atom), shape_of(atom).dtype) for atom in jaxpr.outvars
    ]


def _run_other(eqn: core.JaxprEqn, ins: Sequence[Any], ways: int) -> list[jax.Array]:
    """Run another equation; the branches of a cond may contain loops."""
    name, branches = eqn.primitive.name, eqn.params.get("branches", ())
    if name != "cond" or not any(has_loops(branch.jaxpr) for branch in branches):
        return bind(eqn, ins)
    runs = [
        lambda *ins, branch=branch: _evaluate(branch, ins, ways) for branch in branches
    ]
    return jax.lax.switch(ins[0], runs, *ins[1:])


def _run_loops(
    alike: Sequence[core.JaxprEqn], ins: Sequence[Sequence[Any]], ways: int
) -> list[list[jax.Array]]:
    """Run equal loops, each on its operands."""
    eqn, num = alike[0], len(alike)
    layers = _num_layers(eqn)
    if layers and layers % ways == 0:
        return [_run_by_layers(eqn, own, layers) for own in ins]
    if num == 1:
        return [[_whole(x) for x in bind(eqn, [_whole(x) for x in ins[0]])]]
    filled = [*ins, *[ins[-1]] * (-num % ways)]
    columns = list(zip(*filled, strict=True))
    # A counter that all loops share is not batched, so conditions on it stay branches.
    axes = [
        None if _is_same([loop.invars[i] for loop in alike]) else 0
        for i in range(len(columns))
    ]
    stacked = [
        column[0] if axis is None else _to_shards(jnp.stack(column), ways)
        for axis, column in zip(axes, columns, strict=True)
    ]
    outs = jax.vmap(lambda *own: bind(eqn, own), in_axes=axes)(*stacked)
    outs = [_from_shards(x, ways) for x in outs]
    return [[x[i] for x in outs] for i in range(num)]


def _run_by_layers(
    eqn: core.JaxprEqn, ins: Sequence[Any], layers: int
) -> list[jax.Array]:
    """Run a loop on stacked layers, every data shard on its own layers."""

    def split(x: Any) -> Any:
        return _split_by(x, 0) if jnp.ndim(x) > 2 and x.shape[0] == layers else x

    return [split(x) for x in bind(eqn, [split(x) for x in ins])]


def _whole(x: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, P()) if jnp.ndim(x) > 1 else x


def _to_shards(stack: jax.Array, ways: int) -> jax.Array:
    """Redistribute a stack of sharded arrays: each data shard gets some in full."""
    # Without the first constraint the compiler exchanges the arrays one by one.
    return _split_by(_split_by(stack, _stored_dim(stack, ways)), 0)


def _from_shards(stack: jax.Array, ways: int) -> jax.Array:
    """Undo `_to_shards`."""
    return _split_by(_split_by(stack, 0), _stored_dim(stack, ways))


def _stored_dim(stack: jax.Array, ways: int) -> int | None:
    """The dim of a stack's arrays that data splits in storage.

    A guess, the largest dim: an array split by another dim is exchanged once more.
    """
    dims = [dim for dim in range(1, stack.ndim) if stack.shape[dim] % ways == 0]
    return max(dims, key=lambda dim: (stack.shape[dim], dim), default=None)


def _split_by(x: jax.Array, dim: int | None) -> jax.Array:
    """Split a stack over data by a dim; tensor and pipe may split dims other than 0."""
    entries: list[Any] = [None, *[P.UNCONSTRAINED] * (x.ndim - 1)]
    if dim is not None:
        entries[dim] = DATA
    return jax.lax.with_sharding_constraint(x, P(*entries))


def _levels(
    jaxpr: core.Jaxpr,
) -> list[tuple[list[core.JaxprEqn], list[core.JaxprEqn]]]:
    """(loops, other equations), by the number of loops that each depends on."""
    waits: dict[Any, int] = {}
    levels: list[tuple[list, list]] = [([], [])]
    for eqn in jaxpr.eqns:
        ins = (atom for atom in eqn.invars if not isinstance(atom, core.Literal))
        level = max((waits.get(var, 0) for var in ins), default=0) + _is_loop(eqn)
        waits.update(dict.fromkeys(eqn.outvars, level))
        if level == len(levels):
            levels.append(([], []))
        levels[level][not _is_loop(eqn)].append(eqn)
    return levels


def _groups(loops: Sequence[core.JaxprEqn]) -> list[list[core.JaxprEqn]]:
    """Group loops with equal bodies and operand shapes."""
    groups: dict[tuple, list[core.JaxprEqn]] = {}
    for eqn in loops:
        shapes = [shape_of(atom) for atom in eqn.invars]
        # A jaxpr's text does not show its constants.
        own = id(eqn) if any(map(_has_constants, _inner(eqn))) else 0
        key = (eqn.primitive.name, str(shapes), str(eqn.params), own)
        groups.setdefault(key, []).append(eqn)
    return list(groups.values())


def _has_constants(jaxpr: core.Jaxpr) -> bool:
    inner = (part for eqn in jaxpr.eqns for part in _inner(eqn))
    return bool(jaxpr.constvars) or any(map(_has_constants, inner))


def _is_same(atoms: Sequence[Any]) -> bool:
    """Whether loops read the same scalar."""
    first = atoms[0]
    if isinstance(first, core.Literal):
        return all(isinstance(x, core.Literal) and x.val == first.val for x in atoms)
    return not shape_of(first).shape and all(atom is first for atom in atoms)


def _is_loop(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name in ("scan", "while") and bool(_products_of(eqn))


def _num_layers(eqn: core.JaxprEqn) -> int:
    """Layers of a loop on stacked matrices; 0 if a matmul is not batched."""
    layers = {
        shape_of(product.invars[0]).shape[0] if _is_batched(product) else 0
        for product in _products_of(eqn)
    }
    return layers.pop() if len(layers) == 1 else 0


def _is_batched(product: core.JaxprEqn) -> bool:
    _, batch = product.params["dimension_numbers"]
    return all(dims[:1] == (0,) for dims in batch)


def _products_of(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Matmuls inside an equation; not products with vectors, which move few bytes."""
    if eqn.primitive.name == "dot_general":
        return [eqn] if _is_of_matrices(eqn) else []
    inner = (x for jaxpr in _inner(eqn) for x in jaxpr.eqns)
    return [product for x in inner for product in _products_of(x)]


def _inner(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    return [closed.jaxpr for closed in inner_jaxprs(eqn).values()]


def _is_of_matrices(product: core.JaxprEqn) -> bool:
    contracted, batch = product.params["dimension_numbers"]
    return all(
        len(shape_of(operand).shape) > len(dims) + len(stacked)
        for operand, dims, stacked in zip(
            product.invars, contracted, batch, strict=True
        )
    )
