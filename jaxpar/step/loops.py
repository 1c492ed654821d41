"""Which parameters does a loss slice layer by layer, in which loops?"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from jaxpar.jaxprs.choices import without_choice
from jaxpar.jaxprs.compat import scan_counts
from jaxpar.sharding.leaf_sharding import LeafSharding

CALLS = ("jit", "pjit", "checkpoint", "remat2")
"""Primitives that only call the jaxpr in their parameter "jaxpr"."""


def loops_over(
    jaxpr: core.Jaxpr, leaves: Mapping[core.Var, LeafSharding]
) -> Iterator[tuple[int, list[LeafSharding]]]:
    """Find the scans that slice parameters, as `jaxpar.step.gather_at_use` runs them.

    Args:
      jaxpr: a loss's.
      leaves: variable -> the sharding of the parameter that it holds.

    Yields:
      The length of a scan, and the parameters that are gathered in its iterations, with
      all their layers.
    """
    yield from ((length, own) for length, own, _ in _loops(jaxpr, leaves))


def chosen_shares(
    jaxpr: core.Jaxpr, leaves: Sequence[LeafSharding]
) -> dict[str, float]:
    """The parameters of layers that a loss leaves out now and then.

    Args:
      jaxpr: the loss's; its inputs are a key, the parameters, and others.
      leaves: the parameters' shardings, in order.

    Returns:
      Name -> the share of its layers that run, on average.
    """
    pairs = zip(jaxpr.invars[1 : 1 + len(leaves)], leaves, strict=True)
    found = _loops(jaxpr, dict(pairs))
    return {x.name: share for _, own, share in found if share is not None for x in own}


def _loops(
    jaxpr: core.Jaxpr, leaves: Mapping[core.Var, LeafSharding]
) -> Iterator[tuple[int, list[LeafSharding], float | None]]:
    """`loops_over`, each with the share of iterations that it chooses, if it does."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name not in (*CALLS, "scan"):
            continue
        eqn, choice = without_choice(eqn)
        given = [_leaf_of(atom, leaves) for atom in eqn.invars]
        inner = open_jaxpr(eqn.params["jaxpr"])
        passed: list[LeafSharding | None] = list(given)
        if name == "scan":
            first = sum(scan_counts(eqn.params))
            stacks = given[first:]
            slices = [x and x.without_leading_dim() for x in stacks]
            gathered = gathered_in(eqn, slices)
            if any(gathered):
                own = zip(stacks, gathered, strict=True)
                gathers = [x for x, flag in own if flag and x]
                share = None if choice is None else choice.fraction
                yield eqn.params["length"], gathers, share
            left = zip(slices, gathered, strict=True)
            passed = [None] * first + [None if flag else x for x, flag in left]
        pairs = zip(inner.invars, passed, strict=True)
        yield from _loops(inner, {var: x for var, x in pairs if x is not None})


def read_by_layer(jaxpr: core.Jaxpr, leaves: Sequence[LeafSharding]) -> frozenset[str]:
    """The parameters that a loss reads in loops over layers alone, a layer at a time.

    Args:
      jaxpr: the loss's; its inputs are a key, the parameters, and others.
      leaves: the parameters' shardings, in order.

    Returns:
      Their names.
    """
    pairs = zip(jaxpr.invars[1 : 1 + len(leaves)], leaves, strict=True)
    given = {var: leaf for var, leaf in pairs if not is_used_whole(jaxpr, var)}
    shapes = {leaf.name: leaf.shape for leaf in given.values()}
    sliced = [leaf for _, own in loops_over(jaxpr, given) for leaf in own]
    # A loop inside a loop slices a slice.
    nested = {leaf.name for leaf in sliced if leaf.shape != shapes[leaf.name]}
    return frozenset({leaf.name for leaf in sliced} - nested)


def gathered_in(eqn: core.JaxprEqn, slices: Sequence[Any]) -> list[bool]:
    """Which stacks a scan gathers layer by layer.

    Args:
      eqn: the scan.
      slices: by stack, a parameter's slice; None for another array, or if its layers
        can't be sliced as shards.

    Returns:
      By stack. False for a parameter, too, of which the body only slices further.
    """
    jaxpr = open_jaxpr(eqn.params["jaxpr"])
    own = jaxpr.invars[sum(scan_counts(eqn.params)) :]
    return [
        part is not None and is_used_whole(jaxpr, var)
        for part, var in zip(slices, own, strict=True)
    ]


def is_used_whole(jaxpr: core.Jaxpr, var: core.Var) -> bool:
    """Whether anything but slicing scans reads a variable."""

    def reads_whole(eqn: core.JaxprEqn, position: int) -> bool:
        name = eqn.primitive.name
        if name == "scan":
            return position < sum(scan_counts(eqn.params))
        if name not in CALLS:
            return True
        inner = open_jaxpr(eqn.params["jaxpr"])
        return is_used_whole(inner, inner.invars[position])

    return any(atom is var for atom in jaxpr.outvars) or any(
        atom is var and reads_whole(eqn, position)
        for eqn in jaxpr.eqns
        for position, atom in enumerate(eqn.invars)
    )


def open_jaxpr(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.Jaxpr:
    """The jaxpr without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _leaf_of(atom: Any, leaves: Mapping[core.Var, LeafSharding]) -> LeafSharding | None:
    return None if isinstance(atom, core.Literal) else leaves.get(atom)
