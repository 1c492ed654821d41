"""How is a function of many outputs compiled piece by piece, equal pieces once?

XLA's time to compile a program grows with its operations, also where a model without a
scan initialises the same layer 24 times. `split` finds the outputs that share no large
array, and `Pieces.run` computes them apart: pieces that are equal but for their inputs
share one compiled program, and so do those that are equal to no other. Each output has
its sharding there, as in one program.

Keys and small integers are computed before, operation by operation: they are exact in
any program. All that is floating stays in the piece, so that its numbers are those of
one program.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from jaxpar.jaxprs.evaluate import bind, read
from jaxpar.types import PyTree

_SMALL = 4096
"""Elements of an array that pieces compute each for itself, rather than share."""


@dataclasses.dataclass(frozen=True)
class JaxprPiece:
    """Some outputs of a traced function, and what computes them.

    Attributes:
      outs: their numbers.
      eqns: the equations, in order.
      ins: the variables that are computed before.
      structure: a value that is the same for pieces that differ in `ins` alone.
    """

    outs: tuple[int, ...]
    eqns: tuple[core.JaxprEqn, ...]
    ins: tuple[core.Var, ...]
    structure: Hashable


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A traced function, split.

    Attributes:
      closed: the function, without what no output needs.
      exact: the equations of keys and small integers.
      pieces: the others, by output.
      shape: of the function's result.
    """

    closed: core.ClosedJaxpr
    exact: tuple[core.JaxprEqn, ...]
    pieces: tuple[JaxprPiece, ...]
    shape: PyTree

    @property
    def num_programs(self) -> int:
        """How many pieces differ, were their outputs sharded alike."""
        return len({piece.structure for piece in self.pieces})

    def run(
        self, *args: PyTree, out_shardings: PyTree, puts: PyTree | None = None
    ) -> PyTree:
        """See `compute_in_pieces`."""
        jaxpr = self.closed.jaxpr
        env = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        env.update(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
        for eqn in self.exact:
            outs = bind(eqn, [read(env, atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        shardings = jax.tree.leaves(out_shardings)
        put = jax.tree.leaves(puts)
        programs: dict[Hashable, Callable[..., list]] = {}
        made: dict[int, jax.Array] = {}
        for piece in self.pieces:
            own = tuple(shardings[number] for number in piece.outs)
            kind = piece.structure, own
            if kind not in programs:
                programs[kind] = jax.jit(self.function(piece), out_shardings=list(own))
            outs = programs[kind](*[env[var] for var in piece.ins])
            # Programs with collectives stall if many are in flight.
            for number, out in zip(
                piece.outs, jax.block_until_ready(outs), strict=True
            ):
                made[number] = put[number](out) if put else out
            del outs
        leaves = [made[number] for number in range(len(jaxpr.outvars))]
        return jax.tree.unflatten(jax.tree.structure(self.shape), leaves)

    def function(self, piece: JaxprPiece) -> Callable[..., list]:
        """A piece as a function of `JaxprPiece.ins`."""
        results = [self.closed.jaxpr.outvars[number] for number in piece.outs]

        def piece_of(*ins: Any) -> list:
            env: dict[Any, Any] = dict(zip(piece.ins, ins, strict=True))
            for eqn in piece.eqns:
                outs = bind(eqn, [read(env, atom) for atom in eqn.invars])
                env.update(zip(eqn.outvars, outs, strict=True))
            return [jnp.asarray(read(env, atom)) for atom in results]

        return piece_of


def compute_in_pieces(
    fn: Callable[..., PyTree],
    *args: PyTree,
    out_shardings: PyTree,
    puts: PyTree | None = None,
) -> PyTree:
    """Call a function piece by piece if that takes half the programs, or at once.

    Args:
      fn: takes and returns pytrees of arrays.
      *args: its arguments.
      out_shardings: the sharding of every output.
      puts: a function for every output, which stores it elsewhere and returns what
        stands for it: then pieces are as small as can be, one at a time in memory.

    Returns:
      The function's result.
    """
    pieces = split(fn, *args, joins_singles=puts is None)
    if pieces is None or (
        puts is None and len(pieces.pieces) < 2 * pieces.num_programs
    ):
        made = jax.jit(fn, out_shardings=out_shardings)(*args)
        return made if puts is None else jax.tree.map(lambda f, x: f(x), puts, made)
    return pieces.run(*args, out_shardings=out_shardings, puts=puts)


def split(
    fn: Callable[..., PyTree], *args: PyTree, joins_singles: bool = True
) -> Pieces | None:
    """Trace a function, and split it into pieces.

    Args:
      fn: takes and returns pytrees of arrays.
      *args: its arguments, or their shapes.
      joins_singles: whether pieces that are equal to no other are one.

    Returns:
      The pieces; None for a function with effects, such as one that prints, or with
      constants on devices of their own, which one program alone may hold.
    """
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    if closed.jaxpr.effects or any(map(_is_committed, closed.consts)):
        return None
    every = [True] * len(closed.jaxpr.outvars)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, every, instantiate=True)
    before = {*jaxpr.invars, *jaxpr.constvars}
    exact, others = [], {}
    for number, eqn in enumerate(jaxpr.eqns):
        reads = _variables(eqn.invars)
        is_first = before.issuperset(reads)
        if is_first and all(map(_is_exact, [*reads, *eqn.outvars])):
            exact.append(eqn)
            before.update(eqn.outvars)
        else:
            others.update(dict.fromkeys(eqn.outvars, number))
    needed = [_needed(jaxpr, atom, others) for atom in jaxpr.outvars]

    def made(outs: tuple[int, ...]) -> JaxprPiece:
        numbers: set[int] = set().union(*(needed[n] for n in outs))
        return _piece(jaxpr, outs, numbers, before)

    pieces = list(map(made, _together(jaxpr, needed)))
    pieces = _without_singles(pieces, made) if joins_singles else pieces
    rest = core.ClosedJaxpr(jaxpr, closed.consts)
    return Pieces(rest, tuple(exact), tuple(pieces), shape)


def _is_committed(constant: Any) -> bool:
    return isinstance(constant, jax.Array) and constant.committed


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def _variables(atoms: Sequence[Any]) -> list[core.Var]:
    return [atom for atom in atoms if not _is_literal(atom)]


def _is_exact(var: core.Var) -> bool:
    """Whether it is a key, an integer or a flag, and small."""
    dtype = getattr(var.aval, "dtype", None)
    if dtype is None or _num_elements(var) > _SMALL:
        return False
    kinds = jax.dtypes.prng_key, jnp.integer, jnp.bool_
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def _num_elements(var: core.Var) -> int:
    return math.prod(getattr(var.aval, "shape", ()))


def _needed(jaxpr: core.Jaxpr, out: Any, made_by: Mapping[core.Var, int]) -> set[int]:
    """The numbers of the equations that compute an output, keys and integers apart."""
    found: set[int] = set()
    open_atoms = [out]
    while open_atoms:
        atom = open_atoms.pop()
        number = None if _is_literal(atom) else made_by.get(atom)
        if number is not None and number not in found:
            found.add(number)
            open_atoms += jaxpr.eqns[number].invars
    return found


def _together(
    jaxpr: core.Jaxpr, needed: Sequence[Collection[int]]
) -> list[tuple[int, ...]]:
    """The outputs, those that need a same large array together."""
    joined = list(range(len(needed)))

    def group_of(out: int) -> int:
        while joined[out] != out:
            out = joined[out]
        return out

    first: dict[int, int] = {}
    for out, eqns in enumerate(needed):
        for number in eqns:
            if any(_num_elements(x) > _SMALL for x in jaxpr.eqns[number].outvars):
                joined[group_of(out)] = group_of(first.setdefault(number, out))
    groups: dict[int, list[int]] = {}
    for out in range(len(needed)):
        groups.setdefault(group_of(out), []).append(out)
    return list(map(tuple, groups.values()))


def _without_singles(
    pieces: Sequence[JaxprPiece], made: Callable[[tuple[int, ...]], JaxprPiece]
) -> list[JaxprPiece]:
    """The pieces; those that are equal to no other are one."""
    count = collections.Counter(piece.structure for piece in pieces)
    repeated = [piece for piece in pieces if count[piece.structure] > 1]
    rest = [piece.outs for piece in pieces if count[piece.structure] == 1]
    singles = tuple(sorted(number for outs in rest for number in outs))
    return [*repeated, made(singles)] if singles else repeated


def _piece(
    jaxpr: core.Jaxpr,
    outs: tuple[int, ...],
    numbers: Collection[int],
    before: Collection[core.Var],
) -> JaxprPiece:
    eqns = tuple(jaxpr.eqns[number] for number in sorted(numbers))
    results = [jaxpr.outvars[number] for number in outs]
    read_by = [*(atom for eqn in eqns for atom in eqn.invars), *results]
    ins = tuple(dict.fromkeys(x for x in _variables(read_by) if x in before))
    return JaxprPiece(outs, eqns, ins, _structure_of(ins, eqns, results))


# When two pieces are equal.


def _structure_of(
    ins: Sequence[core.Var], eqns: Sequence[core.JaxprEqn], outs: Sequence[Any]
) -> Hashable:
    """A value that is the same where only the variables differ."""
    numbers: dict[core.Var, int] = {}

    def define(variables: Sequence[Any]) -> Hashable:
        for var in variables:
            numbers[var] = len(numbers)
        return tuple(str(var.aval) for var in variables)

    def use(atoms: Sequence[Any]) -> Hashable:
        return tuple(_value_of(x.val) if _is_literal(x) else numbers[x] for x in atoms)

    found: list[Hashable] = [define(ins)]
    for eqn in eqns:
        params = tuple((k, _value_of(v)) for k, v in sorted(eqn.params.items()))
        made = eqn.primitive, params, repr(eqn.ctx), use(eqn.invars)
        found.append((made, define(eqn.outvars)))
    return tuple(found), use(outs)


def _value_of(value: Any) -> Hashable:
    """A value that is the same for equal parameters of equations, and no others."""
    if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
        consts = tuple(map(id, getattr(value, "consts", ())))
        inner = getattr(value, "jaxpr", value)
        ins = (*inner.constvars, *inner.invars)
        return consts, _structure_of(ins, inner.eqns, inner.outvars)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_value_of, value))
    if isinstance(value, int | float | complex | np.generic | np.ndarray):
        array = np.asarray(value)
        return type(value), str(array.dtype), array.shape, array.tobytes()
    if isinstance(value, Hashable):
        return type(value), value
    return id(value)
