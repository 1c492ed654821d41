"""Which random numbers does a traced function draw, and how are they replaced?

`find_draws` finds the equations of a jaxpr that draw, also inside calls, loops and
branches, and `redrawn` evaluates the jaxpr with a rule for them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from jaxpar.jaxprs.compat import scan_counts
from jaxpar.jaxprs.evaluate import (
    bind,
    equations,
    inner_jaxprs,
    read,
    scope_of,
    shape_of,
)

Path = tuple[int, ...]
"""An equation's index in its jaxpr, after the indices of the enclosing equations."""

_OF_NUMBERS = frozenset(
    {"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform"}
)
_DRAWS = _OF_NUMBERS | {"random_split", "random_fold_in"}


@dataclasses.dataclass(frozen=True)
class Draw:
    """An equation that draws random bits, or derives keys.

    Attributes:
      path: its position.
      eqn: the equation.
      is_in_while: whether it is in a while loop, as in rejection sampling.
      is_hidden: whether `redrawn` can't replace it (inside a custom derivative, say).
      lengths: lengths of the enclosing scans, the outermost first.
    """

    path: Path
    eqn: core.JaxprEqn
    is_in_while: bool = False
    is_hidden: bool = False
    lengths: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The requested shape; that of the last operand if there is none."""
        if "shape" in self.eqn.params:
            return tuple(self.eqn.params["shape"])
        return tuple(shape_of(self.eqn.invars[-1]).shape)

    @property
    def where(self) -> str:
        """The source line, as "at ...", if JAX knows it."""
        line = source_info_util.summarize(self.eqn.source_info)
        return f"at {line}" if line else "in a function of JAX's own"

    @property
    def is_threefry(self) -> bool:
        """Whether its key is a threefry key, jax's default."""
        return str(shape_of(self.eqn.invars[0]).dtype) == "key<fry>"


Rule = Callable[[Draw, Sequence[Any]], Sequence[Any] | None]
"""Maps a draw and its operands to new outputs; None to leave the draw as it is."""


def find_draws(jaxpr: core.Jaxpr) -> list[Draw]:
    """List the draws of a jaxpr, in its order.

    Keys that no number is made of are none: a model without dropout, whose layers each
    get a key, draws nothing.
    """
    names = {eqn.primitive.name for eqn in equations(jaxpr)}
    returns_keys = any(_is_key(atom) for atom in jaxpr.outvars)
    if names.isdisjoint(_OF_NUMBERS | {"random_unwrap"}) and not returns_keys:
        return []
    return list(_draws_in(jaxpr, ()))


def _is_key(atom: core.Var | core.Literal) -> bool:
    return jnp.issubdtype(shape_of(atom).dtype, jax.dtypes.prng_key)


def _draws_in(jaxpr: core.Jaxpr, path: Path) -> Iterator[Draw]:
    for index, eqn in enumerate(jaxpr.eqns):
        name, own = eqn.primitive.name, (*path, index)
        if name in _DRAWS:
            yield Draw(own, eqn)
            continue
        for number, inner in enumerate(inner_jaxprs(eqn).values()):
            for draw in _draws_in(inner.jaxpr, (*own, number)):
                length = (eqn.params["length"],) if name == "scan" else ()
                yield dataclasses.replace(
                    draw,
                    is_in_while=draw.is_in_while or name == "while",
                    is_hidden=draw.is_hidden or name not in _ENTERED,
                    lengths=length + draw.lengths,
                )


def redrawn(closed: core.ClosedJaxpr, args: Sequence[Any], rule: Rule) -> list[Any]:
    """Evaluate a jaxpr with a rule for its draws.

    Equations without a draw inside are evaluated as they were traced.

    Args:
      closed: the traced function.
      args: its arguments, flat.
      rule: called for every draw that is not hidden.

    Returns:
      Its results, flat.
    """
    draws = {draw.path: draw for draw in find_draws(closed.jaxpr) if not draw.is_hidden}
    outs = _Evaluation(draws, rule).run(closed, args, ())
    # A constant output is a NumPy literal in the jaxpr.
    return [jnp.asarray(out) for out in outs]


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    draws: dict[Path, Draw]
    rule: Rule

    def run(self, closed: core.ClosedJaxpr, args: Sequence[Any], path: Path) -> list:
        jaxpr = closed.jaxpr
        env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for index, eqn in enumerate(jaxpr.eqns):
            ins = [read(env, atom) for atom in eqn.invars]
            outs = self._equation(eqn, ins, (*path, index))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(env, atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: core.JaxprEqn, ins: list, path: Path) -> Sequence[Any]:
        if path in self.draws:
            outs = self.rule(self.draws[path], ins)
            return bind(eqn, ins) if outs is None else outs
        entered = _ENTERED.get(eqn.primitive.name)
        if entered and any(own[: len(path)] == path for own in self.draws):
            with scope_of(eqn):
                return entered(self, eqn, ins, path)
        return bind(eqn, ins)

    def _inner(self, eqn: core.JaxprEqn, number: int, path: Path) -> Callable:
        """An inner jaxpr of an equation, as a function of flat arguments."""
        inner = list(inner_jaxprs(eqn).values())[number]
        return lambda *args: self.run(inner, args, (*path, number))

    def call(self, eqn: core.JaxprEqn, ins: list, path: Path) -> list:
        return self._inner(eqn, 0, path)(*ins)

    def checkpoint(self, eqn: core.JaxprEqn, ins: list, path: Path) -> list:
        options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        return jax.checkpoint(self._inner(eqn, 0, path), **options)(*ins)

    def scan(self, eqn: core.JaxprEqn, ins: list, path: Path) -> list:
        num_consts, num_carry = scan_counts(eqn.params)
        run, split = self._inner(eqn, 0, path), num_consts + num_carry

        def body(carry: list, xs: list) -> tuple[list, list]:
            outs = run(*ins[:num_consts], *carry, *xs)
            return outs[:num_carry], outs[num_carry:]

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = jax.lax.scan(body, ins[num_consts:split], ins[split:], **options)
        return [*carry, *ys]

    def while_(self, eqn: core.JaxprEqn, ins: list, path: Path) -> list:
        of_cond, of_body = (eqn.params[f"{n}_nconsts"] for n in ("cond", "body"))
        names = list(inner_jaxprs(eqn))
        cond_fn, body_fn = (
            self._inner(eqn, names.index(name), path)
            for name in ("cond_jaxpr", "body_jaxpr")
        )
        consts = ins[:of_cond], ins[of_cond : of_cond + of_body]
        return jax.lax.while_loop(
            lambda carry: cond_fn(*consts[0], *carry)[0],
            lambda carry: body_fn(*consts[1], *carry),
            ins[of_cond + of_body :],
        )

    def cond(self, eqn: core.JaxprEqn, ins: list, path: Path) -> list:
        branches = [
            self._inner(eqn, number, path)
            for number in range(len(eqn.params["branches"]))
        ]
        return jax.lax.switch(ins[0], branches, *ins[1:])


_ENTERED: dict[str, Callable[[_Evaluation, core.JaxprEqn, list, Path], list]] = {
    "jit": _Evaluation.call,
    "pjit": _Evaluation.call,
    "checkpoint": _Evaluation.checkpoint,
    "remat2": _Evaluation.checkpoint,
    "scan": _Evaluation.scan,
    "while": _Evaluation.while_,
    "cond": _Evaluation.cond,
}
