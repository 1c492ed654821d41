"""Do the parts of a `PipelineModel` fit each other: shapes, names, keywords, ties?"""

from collections.abc import Mapping, Sequence

import jax

from jaxpar import tree
from jaxpar.model.bridge import Network
from jaxpar.model.proxies import Call, keywords_of, program_of
from jaxpar.model.section import SectionNetwork
from jaxpar.types import PyTree


def check_ties(embed: Network, head: Network, tied: Mapping[str, str]) -> None:
    """Raise for tied parameters that are not there, or differ in shape."""
    leaves = {"embed": _leaves(embed), "head": _leaves(head)}
    for path, own in tied.items():
        for part, name in (("embed", own), ("head", path)):
            if name not in leaves[part]:
                raise ValueError(
                    f"PipelineModel: tied: {part} has no parameter {name!r}; it has "
                    f"{', '.join(leaves[part])}."
                    + tree.near_match(name, list(leaves[part]))
                )
        shapes = leaves["embed"][own].shape, leaves["head"][path].shape
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"PipelineModel: tied: embed's {own!r} has shape {shapes[0]}, head's "
                f"{path!r} {shapes[1]}; tied parameters are one array."
            )


def check_equal_blocks(section: str, blocks: Sequence[Network]) -> None:
    """Raise for blocks of one section whose variables differ in name or shape."""
    ours = _leaves(blocks[0]) | _states(blocks[0])
    for number, block in enumerate(blocks):
        theirs = _leaves(block) | _states(block)
        for name in {**ours, **theirs}:
            found = [
                side[name].shape if name in side else None for side in (ours, theirs)
            ]
            if found[0] != found[1]:
                raise ValueError(
                    f"PipelineModel: {section}: block {number} has {name} of shape "
                    f"{found[1]}, block 0 of {found[0]}; blocks are stacked, so their "
                    "variables must be equal in name and shape. Move what differs to "
                    "embed or head, or make it a section of its own."
                )


def check_equal_programs(section: str, blocks: Sequence[Network], call: Call) -> None:
    """Raise for blocks of equal parameters and different computations."""
    if len(blocks) == 1:
        return
    first, *others = (program_of(block, call) for block in blocks)
    for number, program in enumerate(others, start=1):
        if program != first:
            raise ValueError(
                f"PipelineModel: {section}: block {number} computes something else "
                "than block 0 with parameters of equal shapes; all blocks run block "
                "0's program, and only their initialisation may differ. Make it a "
                "section of its own."
            )


def check_keywords(
    call: Call,
    embed: Network,
    sections: Sequence[SectionNetwork],
    head: Network,
    hidden: PyTree,
) -> frozenset[str] | None:
    """Raise for keywords of the model's call that no part takes.

    Args:
      call: the arguments of loss_fn's call.
      embed: the embedding.
      sections: the sections.
      head: the head.
      hidden: the shapes of the head's input.

    Returns:
      The keywords that any part takes; None if one takes all.
    """
    taken = {"embed": keywords_of(embed, call)}
    for section in sections:
        own = call.passing(section.hidden)
        taken[section.name] = keywords_of(section.blocks[0], own)
        if section.between is not None:
            own = call.passing(section.before)
            taken[section.between_name] = keywords_of(section.between, own)
    taken["head"] = keywords_of(head, call.passing(hidden))
    known = {name for names in taken.values() for name in names or ()}
    for name in call.kwargs:
        if name not in known and None not in taken.values():
            of_parts = (
                f"{part} takes {', '.join(sorted(names or ())) or 'none'}"
                for part, names in taken.items()
            )
            raise ValueError(
                f"loss_fn: it calls the model with {name}=, which no part takes: "
                f"{'; '.join(of_parts)}.{tree.near_match(name, known)}"
            )
    return None if None in taken.values() else frozenset(known)


def check_block_output(section: str, given: PyTree, returned: PyTree) -> None:
    """Raise for a block whose output is not like its input."""

    def kinds(part: PyTree) -> list[tuple]:
        return [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(part)]

    same = jax.tree.structure(given) == jax.tree.structure(returned)
    if not same or kinds(given) != kinds(returned):
        raise ValueError(
            f"PipelineModel: {section}: a block is given {kinds(given)} (shape, dtype) "
            f"and returns {kinds(returned)}; a block's output is the next one's input, "
            "so they must be alike. Change widths and dtypes in embed or head, or in "
            "a part between two sections."
        )


def _leaves(network: Network) -> dict[str, jax.ShapeDtypeStruct]:
    params, _ = jax.eval_shape(network.init, jax.random.key(0))
    return tree.named_leaves(params)


def _states(network: Network) -> dict[str, jax.ShapeDtypeStruct]:
    _, state = jax.eval_shape(network.init, jax.random.key(0))
    return tree.named_leaves(state)
