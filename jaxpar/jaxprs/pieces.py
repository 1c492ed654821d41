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
import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxpar.jaxprs.dependence import of_outputs
from jaxpar.jaxprs.evaluate import bind, read
from jaxpar.types import PyTree

_SMALL = 4096
"""Elements of an array that pieces compute each for itself, rather than share."""

_IN_FLIGHT = 8
"""Pieces that may run at a time. XLA:CPU stalls with 32 programs with collectives."""


@dataclasses.dataclass(frozen=True)
class JaxprPiece:
    """Some outputs of a traced function, and what computes them.

    Attributes:
      outs: their numbers.
      eqns: the equations, in order.
      ins: the variables that are computed before.
    """

    outs: tuple[int, ...]
    eqns: tuple[core.JaxprEqn, ...]
    ins: tuple[core.Var, ...]


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A traced function, split.

    Attributes:
      closed: the function, without what no output needs.
      exact: the equations of keys and small integers.
      pieces: the others, by output.
      structure: of the function's result.
    """

    closed: core.ClosedJaxpr
    exact: tuple[core.JaxprEqn, ...]
    pieces: tuple[JaxprPiece, ...]
    structure: Any

    def run(self, *args: PyTree, places: PyTree, one_by_one: bool) -> PyTree:
        """Compute the function.

        Args:
          *args: its arguments.
          places: the sharding of every output.
          one_by_one: whether each piece is finished before the next begins.

        Returns:
          Its result.
        """
        jaxpr = self.closed.jaxpr
        env = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        env.update(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
        for eqn in self.exact:
            outs = bind(eqn, [read(env, atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        shardings = jax.tree.leaves(places)
        made: dict[int, jax.Array] = {}
        running: collections.deque[list] = collections.deque()
        for piece, same in zip(self.pieces, self._structures, strict=True):
            own = tuple(shardings[number] for number in piece.outs)
            if (same, own) not in self._programs:
                jitted = jax.jit(self.function(piece), out_shardings=list(own))
                self._programs[same, own] = jitted
            outs = self._programs[same, own](*[env[var] for var in piece.ins])
            made.update(zip(piece.outs, outs, strict=True))
            running.append(outs)
            if one_by_one or len(running) > _IN_FLIGHT:
                jax.block_until_ready(running.popleft())
        return jax.tree.unflatten(
            self.structure, [made[number] for number in range(len(jaxpr.outvars))]
        )

    @property
    def num_programs(self) -> int:
        """How many pieces differ, were their outputs sharded alike."""
        return len(set(self._structures))

    @functools.cached_property
    def _structures(self) -> list[Hashable]:
        """By piece, a value that is the same where only the inputs differ."""
        return [_structure_of(self.closed.jaxpr, piece) for piece in self.pieces]

    @functools.cached_property
    def _programs(self) -> dict[Hashable, Callable[..., list]]:
        return {}

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


def jit_in_pieces(
    fn: Callable[..., PyTree], *args: Any, out_shardings: PyTree, one_by_one: bool
) -> Callable[..., PyTree]:
    """Compile a function piece by piece if that takes half the programs, or at once.

    Args:
      fn: takes and returns pytrees of arrays.
      *args: its arguments, or their shapes.
      out_shardings: the sharding of every output.
      one_by_one: whether each piece is finished before the next begins.
    """
    pieces = split(fn, *args)
    if pieces is None or len(pieces.pieces) < 2 * pieces.num_programs:
        return jax.jit(fn, out_shardings=out_shardings)
    return functools.partial(pieces.run, places=out_shardings, one_by_one=one_by_one)


def split(fn: Callable[..., PyTree], *args: Any) -> Pieces | None:
    """Trace a function, and split it into pieces.

    Args:
      fn: takes and returns pytrees of arrays.
      *args: its arguments, or their shapes.

    Returns:
      The pieces; None for a function with effects, such as one that prints.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    if closed.jaxpr.effects:
        return None
    jaxpr = of_outputs(closed.jaxpr, range(len(closed.jaxpr.outvars)))
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

    pieces = _without_singles(jaxpr, list(map(made, _together(jaxpr, needed))), made)
    rest = core.ClosedJaxpr(jaxpr, closed.consts)
    return Pieces(rest, tuple(exact), tuple(pieces), jax.tree.structure(shapes))


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
    jaxpr: core.Jaxpr,
    pieces: Sequence[JaxprPiece],
    made: Callable[[tuple[int, ...]], JaxprPiece],
) -> list[JaxprPiece]:
    """The pieces; those that are equal to no other are one."""
    structures = [_structure_of(jaxpr, piece) for piece in pieces]
    count = collections.Counter(structures)
    is_single = [count[structure] == 1 for structure in structures]
    rest = [piece for piece, single in zip(pieces, is_single, strict=True) if single]
    repeated = [x for x, single in zip(pieces, is_single, strict=True) if not single]
    singles = tuple(sorted(number for piece in rest for number in piece.outs))
    return [*repeated, made(singles)] if singles else repeated


def _piece(
    jaxpr: core.Jaxpr,
    outs: tuple[int, ...],
    numbers: Collection[int],
    before: Collection[core.Var],
) -> JaxprPiece:
    eqns = tuple(jaxpr.eqns[number] for number in sorted(numbers))
    read_by = [*(atom for eqn in eqns for atom in eqn.invars)]
    read_by += [jaxpr.outvars[number] for number in outs]
    ins = dict.fromkeys(x for x in _variables(read_by) if x in before)
    return JaxprPiece(outs, eqns, tuple(ins))


# When two pieces are equal.


def _structure_of(jaxpr: core.Jaxpr, piece: JaxprPiece) -> Hashable:
    results = [jaxpr.outvars[number] for number in piece.outs]
    return _structural_of(piece.ins, piece.eqns, results)


def _structural_of(
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
        return consts, _structural_of(ins, inner.eqns, inner.outvars)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_value_of, value))
    if isinstance(value, int | float | complex | np.generic | np.ndarray):
        array = np.asarray(value)
        return type(value), str(array.dtype), array.shape, array.tobytes()
    if isinstance(value, Hashable):
        return type(value), value
    return id(value)
