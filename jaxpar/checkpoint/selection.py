"""Which of a state's leaves are read from a checkpoint, under which names there?"""

from collections.abc import Iterable, Mapping, Sequence

from jaxpar.tree import matches, near_match


def select(
    leaves: Iterable[str],
    *,
    only: Sequence[str] | None,
    reset: Sequence[str],
    rename: Mapping[str, str],
) -> dict[str, str]:
    """Choose the leaves to read.

    Args:
      leaves: names of the state's leaves.
      only: patterns of those to read, such as "params/*"; None for all.
      reset: patterns of those to leave unchanged, such as "opt_state/*".
      rename: leaf here -> its name in the checkpoint. A name that ends in "/*" on both
        sides stands for all leaves below it.

    Returns:
      Leaf here -> name in the checkpoint.

    Raises:
      ValueError: if a pattern or a name matches no leaf, two leaves would be read from
        one, or nothing is left to read.

    Example:
      >>> leaves = ["params/a", "params/b", "opt_state/mu"]
      >>> select(leaves, only=["params/*"], reset=(), rename={"params/a": "params/x"})
      {'params/a': 'params/x', 'params/b': 'params/b'}
    """
    names = list(leaves)
    for argument, patterns in (("only", only or ()), ("reset", reset)):
        for pattern in patterns:
            if not any(matches(pattern, name) for name in names):
                raise ValueError(
                    f"{argument}: {pattern!r} matches no leaf of this state."
                    f"{near_match(pattern, names)}"
                )
    chosen = [
        name
        for name in names
        if (only is None or any(matches(pattern, name) for pattern in only))
        and not any(matches(pattern, name) for pattern in reset)
    ]
    if not chosen:
        raise ValueError(
            f"only={only!r} and reset={reset!r} leave nothing to read; give the "
            "patterns of the leaves to read from the checkpoint."
        )
    found = {name: name for name in chosen}
    for here, there in rename.items():
        found |= _renamed(chosen, here, there, names)
    taken: dict[str, str] = {}
    for here, there in found.items():
        if there in taken:
            raise ValueError(
                f"rename: {taken[there]!r} and {here!r} would both be read from "
                f"{there!r}; name another leaf, or exclude one with reset=."
            )
        taken[there] = here
    return found


def _renamed(
    chosen: Sequence[str], here: str, there: str, names: Sequence[str]
) -> dict[str, str]:
    """Names in the checkpoint of the leaves that one entry of `rename` covers."""
    if here.endswith("/*") != there.endswith("/*"):
        raise ValueError(
            f"rename: {here!r} and {there!r} must both name a leaf, or both end in "
            "'/*' for all leaves below."
        )
    if not here.endswith("/*"):
        found = {here: there} if here in chosen else {}
    else:
        below, instead = here[:-1], there[:-1]
        found = {
            name: instead + name.removeprefix(below)
            for name in chosen
            if name.startswith(below)
        }
    if not found:
        raise ValueError(
            f"rename: {here!r} is not a leaf to read.{near_match(here, names)}"
        )
    return found
