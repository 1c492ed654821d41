"""Which name has a leaf in a checkpoint from before it was renamed?"""

from collections.abc import Container, Iterable, Mapping, Sequence


def former_names(
    leaves: Iterable[str],
    parameters: Iterable[str],
    pairs: Sequence[tuple[str, str]],
) -> dict[str, tuple[str, ...]]:
    """List the earlier names of a state's leaves.

    Args:
      leaves: names of the state's leaves.
      parameters: names of the parameters. A leaf that belongs to one ends with its name
        (``params/embed/table``, ``opt_state/0/mu/embed/table``). Leaves may be among
        them, with their whole names.
      pairs: (name of one of them, its earlier name); both may end in ``/*``.

    Returns:
      Leaf -> its earlier names, for the leaves that have any.

    Example:
      >>> leaves = ["params/head/norm/scale", "opt_state/mu/head/norm/scale", "step"]
      >>> found = former_names(leaves, ["head/norm/scale"], [("head/norm/*", "norm/*")])
      >>> found["opt_state/mu/head/norm/scale"]
      ('opt_state/mu/norm/scale',)
    """
    own = {name: _renamed(name, pairs) for name in parameters}
    found = {}
    for leaf in leaves:
        parts = leaf.split("/")
        ends = ["/".join(parts[i:]) for i in range(len(parts))]
        earlier = [
            leaf.removesuffix(end) + name for end in ends for name in own.get(end, ())
        ]
        if earlier:
            found[leaf] = tuple(earlier)
    return found


def as_stored(
    wanted: Mapping[str, str],
    former: Mapping[str, Sequence[str]],
    stored: Container[str],
) -> dict[str, str]:
    """Read leaves by an earlier name where a checkpoint has no other.

    Args:
      wanted: leaf -> name in the checkpoint.
      former: leaf -> its earlier names.
      stored: the names in the checkpoint.

    Returns:
      Leaf -> name in the checkpoint.

    Example:
      >>> as_stored({"a": "a", "b": "b"}, {"a": ("x", "y")}, {"y", "b"})
      {'a': 'y', 'b': 'b'}
    """
    return {
        leaf: next((n for n in (name, *former.get(leaf, ())) if n in stored), name)
        for leaf, name in wanted.items()
    }


def _renamed(name: str, pairs: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    found = []
    for now, before in pairs:
        if not now.endswith("/*") and name == now:
            found.append(before)
        elif now.endswith("/*") and name.startswith(now[:-1]):
            found.append(before[:-1] + name.removeprefix(now[:-1]))
    return tuple(found)
