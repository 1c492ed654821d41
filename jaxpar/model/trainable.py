"""Which parameters are trained: by the path of a leaf, or the type of its Variable."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxpar import tree

Trainable = Sequence[str] | type | tuple[type, ...] | frozenset[str]
"""Path patterns, such as ``["*/lora_a"]``, or types of NNX Variables; a frozenset has
whole names, found before."""


@runtime_checkable
class Typed(Protocol):
    """A network whose parameters are Variables of several types."""

    def variable_types(self) -> dict[str, type]:
        """Leaf name -> the Variable's type."""
        ...


def trainable_names(
    trainable: Trainable | None,
    names: Sequence[str],
    network: Any,
    *,
    argument: str = "trainable",
) -> frozenset[str]:
    """Choose the parameters that are trained.

    Args:
      trainable: as given to `jaxpar.initialize`; None for all.
      names: of all parameters.
      network: the model.
      argument: "trainable", or "trains[...]" of one of several losses, which may
        choose all of them.

    Returns:
      Their names.

    Raises:
      ValueError: if a pattern or a type matches nothing, all are matched, or a type
        is given and the model's parameters have none.

    Example:
      >>> sorted(trainable_names(["*/a"], ["base", "lora/a"], None))
      ['lora/a']
    """
    if trainable is None:
        return frozenset(names)
    if isinstance(trainable, frozenset):
        return trainable
    if isinstance(trainable, str):
        raise ValueError(
            f"{argument}={trainable!r} must be a list of path patterns; pass "
            f"{argument}=[{trainable!r}]."
        )
    entries = [trainable] if isinstance(trainable, type) else trainable
    kinds = type, str
    if not isinstance(entries, Sequence) or not all(
        isinstance(entry, kinds) for entry in entries
    ):
        raise TypeError(
            f"{argument}={trainable!r} must be path patterns, such as ['*/lora_a'], or "
            "types of NNX Variables, such as nnx.LoRAParam."
        )
    if not entries:
        raise ValueError(
            f"{argument}={trainable!r} chooses no parameter; leave it out to train all."
        )
    types = network.variable_types() if isinstance(network, Typed) else {}
    if any(isinstance(entry, type) for entry in entries) and not types:
        raise ValueError(
            f"{argument}={trainable!r}: only the parameters of an NNX module have "
            "Variable types; pass path patterns, such as ['*/lora_a']."
        )
    found: set[str] = set()
    for entry in entries:
        own = {name for name in names if _fits(entry, name, types)}
        if not own:
            raise ValueError(f"{argument}: {_unmatched(entry, names, types)}")
        found |= own
    if len(found) == len(names) and argument == "trainable":
        raise ValueError(
            f"{argument}={trainable!r} matches all {len(names)} parameters, so nothing "
            "is frozen. Leave it out, or match fewer."
        )
    return frozenset(found)


def _fits(entry: Any, name: str, types: Mapping[str, type]) -> bool:
    if isinstance(entry, type):
        return issubclass(types.get(name, object), entry)
    return tree.matches(entry, name)


def _unmatched(entry: Any, names: Sequence[str], types: Mapping[str, type]) -> str:
    if isinstance(entry, type):
        known = sorted({kind.__name__ for kind in types.values()})
        return (
            f"no parameter is a {entry.__name__}; the model's types are "
            f"{', '.join(known)}."
        )
    return (
        f"{entry!r} matches no parameter; known paths: "
        f"{', '.join(list(names)[:8])}.{tree.near_match(entry, names)}"
    )
