"""Which part of a traced function is elementwise, and in which of its inputs?

An optimizer's update of a leaf is mostly a function of the element, its gradient and
moments, and a few scalars. Such a part runs on any piece of the leaf by itself; what it
needs of whole arrays is computed before, where it is a scalar. What is elementwise is
read from the jaxpr, so that any function may be asked.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxpar.jaxprs.evaluate import bind, read, shape_of

_ARITHMETIC = {
    "abs",
    "add",
    "add_any",
    "clamp",
    "div",
    "integer_pow",
    "max",
    "min",
    "mul",
    "neg",
    "pow",
    "rem",
    "sign",
    "square",
    "sub",
}
_COMPARISONS = {
    "and",
    "eq",
    "ge",
    "gt",
    "is_finite",
    "le",
    "lt",
    "ne",
    "not",
    "or",
    "select_n",
    "xor",
}
_FUNCTIONS = {
    "atan2",
    "cbrt",
    "ceil",
    "cos",
    "erf",
    "erf_inv",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "log",
    "log1p",
    "logistic",
    "round",
    "rsqrt",
    "sin",
    "sqrt",
    "tan",
    "tanh",
}
_AS_THEY_ARE = {"convert_element_type", "copy", "reduce_precision", "stop_gradient"}
_BY_ELEMENT = _ARITHMETIC | _COMPARISONS | _FUNCTIONS | _AS_THEY_ARE
"""Primitives whose results have an element for each of their operands'."""


@dataclasses.dataclass(frozen=True)
class LeafGroup:
    """Inputs of a jaxpr that are one leaf's, and the outputs that replace them.

    Attributes:
      name: the leaf's.
      ins: numbers of the inputs, of one shape.
      outs: numbers of their new values, in the same order.
      beside: numbers of other inputs of that shape, such as the gradient.
    """

    name: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    beside: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ByElement:
    """The part of a jaxpr that computes a group's outputs, element by element.

    Attributes:
      group: the group.
      eqns: its equations, in order.
      scalars: variables that are computed before.
      outs: the results.
      inputs: variables of the group's inputs and of those beside.
    """

    group: LeafGroup
    eqns: tuple[core.JaxprEqn, ...]
    scalars: tuple[core.Var, ...]
    outs: tuple[Any, ...]
    inputs: tuple[core.Var, ...]

    def __call__(
        self, pieces: Sequence[jax.Array], scalars: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Compute the new values of a piece.

        Args:
          pieces: of the group's inputs, then of those beside, all of one shape.
          scalars: the values of `scalars`.

        Returns:
          The pieces of the group's outputs.
        """
        shape = pieces[0].shape
        env: dict[Any, Any] = dict(zip(self.inputs, pieces, strict=True))
        env.update(zip(self.scalars, scalars, strict=True))

        for eqn in self.eqns:
            ins = [read(env, atom) for atom in eqn.invars]
            if eqn.primitive.name == "broadcast_in_dim":
                outs = [jnp.broadcast_to(ins[0], shape)]
            else:
                params = eqn.primitive.get_bind_params(eqn.params)
                made = eqn.primitive.bind(*ins, **params)
                outs = made if eqn.primitive.multiple_results else [made]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(env, atom) for atom in self.outs]


@dataclasses.dataclass(frozen=True)
class SplitJaxpr:
    """A traced function, split.

    Attributes:
      parts: those that are elementwise.
      whole: name of a group that is not -> what it would need of the whole leaf.
      closed: the function.
    """

    parts: tuple[ByElement, ...]
    whole: Mapping[str, str]
    closed: core.ClosedJaxpr

    def rest(
        self, args: Mapping[int, jax.Array]
    ) -> tuple[dict[int, jax.Array], list[list[jax.Array]]]:
        """Compute what the parts do not.

        Args:
          args: number of an input -> its value; of all but the parts' own.

        Returns:
          Number of an output -> its value, of all but the parts' own; and for each
          part its scalars.
        """
        numbers, wanted = self._wanted
        found = iter(_evaluated(self.closed, wanted, args))
        outs = {number: next(found) for number in numbers}
        return outs, [[next(found) for _ in part.scalars] for part in self.parts]

    @property
    def reads(self) -> set[int]:
        """Numbers of the inputs that `rest` reads."""
        _, needed = _needed(self.closed.jaxpr, self._wanted[1])
        invars = self.closed.jaxpr.invars
        return {number for number, var in enumerate(invars) if var in needed}

    @property
    def _wanted(self) -> tuple[list[int], list[Any]]:
        """What `rest` computes: numbers of outputs; their variables, and scalars."""
        jaxpr = self.closed.jaxpr
        own = {number for part in self.parts for number in part.group.outs}
        numbers = [n for n in range(len(jaxpr.outvars)) if n not in own]
        scalars = [var for part in self.parts for var in part.scalars]
        return numbers, [*(jaxpr.outvars[n] for n in numbers), *scalars]


def split_by_element(
    closed: core.ClosedJaxpr, groups: Sequence[LeafGroup]
) -> SplitJaxpr:
    """Find the groups whose outputs are computed element by element.

    Args:
      closed: the traced function, calls inlined (`jaxpar.jaxprs.evaluate.inlined`).
      groups: inputs and outputs that are asked of.

    Returns:
      The split. A group is elementwise where its outputs depend on arrays of its own
      inputs alone, and nothing else depends on these.
    """
    whole: dict[str, str] = {}
    while True:
        left = [group for group in groups if group.name not in whole]
        reads = _Reads(closed.jaxpr, left)
        parts, failed = [], {}
        for group in left:
            found = reads.part(group)
            if isinstance(found, str):
                failed[group.name] = found
            else:
                parts.append(found)
        failed |= reads.needed_elsewhere(left)
        if not failed:
            return SplitJaxpr(tuple(parts), whole, closed)
        whole |= failed


class _Reads:
    """What each variable of a jaxpr depends on.

    Args:
      jaxpr: the function's.
      groups: those that are to be elementwise.
    """

    def __init__(self, jaxpr: core.Jaxpr, groups: Sequence[LeafGroup]):
        self.jaxpr = jaxpr
        self.makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.of_groups: dict[core.Var, frozenset[str]] = {}
        for group in groups:
            for number in group.ins:
                self.of_groups[jaxpr.invars[number]] = frozenset({group.name})
        for eqn in jaxpr.eqns:
            found = frozenset().union(*map(self.groups_of, eqn.invars))
            self.of_groups.update(dict.fromkeys(eqn.outvars, found))

    def groups_of(self, atom: Any) -> frozenset[str]:
        """Names of the groups whose inputs a value depends on."""
        is_literal = isinstance(atom, core.Literal)
        return frozenset() if is_literal else self.of_groups.get(atom, frozenset())

    def part(self, group: LeafGroup) -> ByElement | str:
        """The part of a group, or what keeps it from being elementwise."""
        inputs = [self.jaxpr.invars[n] for n in (*group.ins, *group.beside)]
        outs = [self.jaxpr.outvars[n] for n in group.outs]
        shape = shape_of(inputs[0]).shape
        eqns: set[int] = set()
        scalars: dict[core.Var, None] = {}
        left, seen = list(outs), set(inputs)
        while left:
            var = left.pop()
            if isinstance(var, core.Literal) or var in seen:
                continue
            seen.add(var)
            if shape_of(var).shape == () and not self.groups_of(var):
                scalars[var] = None
                continue
            eqn = self.makers.get(var)
            if eqn is None:
                return f"an array of {_text(var)} beside it"
            if not _goes_by_element(eqn, shape):
                return f"{eqn.primitive.name} of {_text(var)}"
            eqns.add(id(eqn))
            left += eqn.invars
        ordered = tuple(eqn for eqn in self.jaxpr.eqns if id(eqn) in eqns)
        return ByElement(group, ordered, tuple(scalars), tuple(outs), tuple(inputs))

    def needed_elsewhere(self, groups: Collection[LeafGroup]) -> dict[str, str]:
        """Name of a group -> which output that is not its own depends on it."""
        own = {number: group.name for group in groups for number in group.outs}
        found: dict[str, str] = {}
        for number, var in enumerate(self.jaxpr.outvars):
            for name in self.groups_of(var) - {own.get(number)}:
                found.setdefault(name, f"result {number} of another leaf depends on it")
        return found


def _text(var: core.Var) -> str:
    found = shape_of(var)
    return f"{found.dtype}[{','.join(map(str, found.shape))}]"


def _goes_by_element(eqn: core.JaxprEqn, shape: tuple[int, ...]) -> bool:
    """Whether an equation's results of a shape have an element for each operand's."""
    name, shapes = eqn.primitive.name, [shape_of(atom).shape for atom in eqn.invars]
    if any(shape_of(var).shape != shape for var in eqn.outvars):
        return False
    if name == "broadcast_in_dim":
        return shapes == [()]
    return name in _BY_ELEMENT and all(found in (shape, ()) for found in shapes)


def _evaluated(
    closed: core.ClosedJaxpr, wanted: Sequence[Any], args: Mapping[int, jax.Array]
) -> list[jax.Array]:
    """Compute some variables of a jaxpr from the inputs that they need."""
    jaxpr = closed.jaxpr
    eqns, _ = _needed(jaxpr, wanted)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update((jaxpr.invars[number], value) for number, value in args.items())
    for eqn in eqns:
        outs = bind(eqn, [read(env, atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(env, atom) for atom in wanted]


def _needed(
    jaxpr: core.Jaxpr, wanted: Sequence[Any]
) -> tuple[list[core.JaxprEqn], set[core.Var]]:
    """The equations that compute some variables, in order, and all that they read."""
    needed = {var for var in wanted if not isinstance(var, core.Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if needed & set(eqn.outvars):
            eqns.append(eqn)
            needed |= {x for x in eqn.invars if not isinstance(x, core.Literal)}
    return eqns[::-1], needed
