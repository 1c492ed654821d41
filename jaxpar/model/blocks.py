"""What is a model that a pipeline can run: an embedding, equal blocks, and a head.

A `PipelineModel` has one tree of parameters on every mesh. On one stage it runs as a
scan over its stacked blocks, without any pipeline code in the program; on more,
`jaxpar.pipeline` runs the same parts by a schedule.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxpar import tree
from jaxpar.model.bridge import Network, make_network
from jaxpar.model.network import PipelineNetwork, WholeModel
from jaxpar.model.proxies import (
    Call,
    call_part,
    inputs_of,
    keywords_of,
    program_of,
    shape_of,
)
from jaxpar.model.remat import check_policy
from jaxpar.types import Batch, LossFn, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineModel:
    """An embedding, equal blocks and a head.

    loss_fn calls ``model(inputs, ...)`` once. Positional arguments go to the embedding;
    keyword arguments, such as positions or segment ids, go to every part whose call
    takes them: arrays, or Python flags, numbers and strings, which stay Python values
    (``training=model.training``). The embedding's output passes through the blocks,
    each called as ``block(hidden)``, to ``head(hidden)``, whose result the call
    returns.

    Attributes:
      embed: an NNX factory ``lambda rngs: MyEmbed(rngs=rngs)`` or a Linen module.
      block: the same; its output has its input's shape and dtype. Or a sequence of
        `num_blocks` of them that differ only in their initialisation.
      num_blocks: number of blocks, stacked in order along a leading dim "layers".
      head: the same as `embed`.
      tied: parameters that share one array, as (("embed", path), ("head", path)); it
        is stored under the first name.
      remat: one of `jaxpar.model.remat.REMAT_POLICIES`, for each block. In a pipeline
        "none" stores every block's residuals, for each micro-batch in flight; the other
        policies store only a stage's input, and its backward recomputes its blocks:
        once under "full", by block under the others.
      remat_names: labels to save, for "save-names".
      unroll: blocks per iteration of the loop over them, on one stage; num_blocks
        removes the loop.
      former_names: parameters that older checkpoints hold under another name, as pairs
        (name now, name then); both may end in ``/*``.

    Raises:
      ValueError: if a number, a policy or a tie is invalid.

    Example:
      >>> from flax import nnx
      >>> model = PipelineModel(
      ...     embed=lambda rngs: nnx.Linear(4, 8, rngs=rngs),
      ...     block=lambda rngs: nnx.Linear(8, 8, rngs=rngs),
      ...     num_blocks=6,
      ...     head=lambda rngs: nnx.Linear(8, 1, rngs=rngs),
      ... )
    """

    embed: Any
    block: Any
    num_blocks: int
    head: Any
    tied: tuple[tuple[tuple[str, str], tuple[str, str]], ...] | tuple = ()
    remat: str = "full"
    remat_names: tuple[str, ...] = ()
    unroll: int = 1
    former_names: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        check_policy(self.remat, self.remat_names)
        if self.num_blocks < 1:
            raise ValueError(
                f"PipelineModel: num_blocks={self.num_blocks} must be at least 1."
            )
        if not 1 <= self.unroll <= self.num_blocks:
            raise ValueError(
                f"PipelineModel: unroll={self.unroll} must be between 1 and num_blocks="
                f"{self.num_blocks}, which removes the loop."
            )
        if isinstance(self.block, Sequence) and len(self.block) != self.num_blocks:
            raise ValueError(
                f"PipelineModel: block has {len(self.block)} entries, but num_blocks="
                f"{self.num_blocks}; give one block for all, or one for each."
            )
        for tie in self._ties:
            ends = [(len(end), end[0]) for end in tie]
            if ends != [(2, "embed"), (2, "head")]:
                raise ValueError(
                    f"PipelineModel: tied={self.tied} must pair ('embed', path) with "
                    "('head', path), such as "
                    "tied=(('embed', 'table'), ('head', 'table'))."
                )

    @property
    def _ties(self) -> tuple:
        """A tuple of pairs of (part, path); a single pair is wrapped."""
        if self.tied and isinstance(self.tied[0][0], str):
            return (self.tied,)
        return tuple(self.tied)

    @property
    def tied_paths(self) -> dict[str, str]:
        """Path in the head -> path in the embedding."""
        return {head: embed for (_, embed), (_, head) in self._ties}

    def init(self, seed: int, *args: Any, **kwargs: Any) -> WholeModel:
        """Make the model on one device, outside of an engine.

        Args:
          seed: of the parameters.
          *args: of a call of the model: arrays or `jax.ShapeDtypeStruct`s.
          **kwargs: likewise.

        Returns:
          The model in evaluation mode; it may be an argument of a jitted function.

        Raises:
          ValueError: if the parts do not fit each other.
        """

        def call(model: Any, call: Call) -> Any:
            return model(*call.args, **call.kwargs)

        network = self.make_network(call, Call(args, kwargs))
        key = jax.random.key(seed)
        params, _ = jax.jit(network.init)(key)
        return WholeModel(network, params, key, training=False)

    def make_network(self, loss_fn: LossFn, sample_batch: Batch) -> PipelineNetwork:
        """Bridge to the parts (see `jaxpar.model.bridge.make_network`)."""
        call = jax.eval_shape(
            lambda batch: inputs_of(loss_fn, batch, training=True), sample_batch
        )
        embed = make_network(self.embed, call_part, call)
        hidden = shape_of(embed, call)
        blocks = self.block if isinstance(self.block, Sequence) else [self.block]
        networks = [
            make_network(block, call_part, call.passing(hidden)) for block in blocks
        ]
        head = make_network(self.head, call_part, call.passing(hidden))
        _check_parts(embed, networks, head, self.tied_paths)
        _check_keywords(call, hidden, embed=embed, block=networks[0], head=head)
        returned = shape_of(networks[0], call.passing(hidden))
        _check_block_output(hidden, returned)
        _check_equal_programs(networks, call.passing(hidden))
        return PipelineNetwork(
            self.num_blocks,
            self.tied_paths,
            self.remat,
            self.remat_names,
            self.unroll,
            self.former_names,
            embed,
            networks,
            head,
        )


def _check_parts(
    embed: Network, blocks: Sequence[Network], head: Network, tied: Mapping[str, str]
) -> None:
    """Raise for parts that do not fit each other."""
    key = jax.random.key(0)
    parts = [("embed", embed), *(("block", block) for block in blocks), ("head", head)]
    made = [(part, *jax.eval_shape(network.init, key)) for part, network in parts]
    for part, _, state in made:
        if jax.tree.leaves(state):
            raise ValueError(
                f"PipelineModel: {part} has state besides parameters "
                f"({', '.join(tree.named_leaves(state))}), which a pipeline can't "
                "update in order; use layers without it (a LayerNorm for a BatchNorm)."
            )
    leaves = [tree.named_leaves(params) for _, params, _ in made]
    for number, own in enumerate(leaves[1:-1]):
        _check_equal_blocks(leaves[1], own, number)
    _check_ties({"embed": leaves[0], "head": leaves[-1]}, tied)


def _check_ties(leaves: Mapping[str, Mapping], tied: Mapping[str, str]) -> None:
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


def _check_equal_blocks(ours: Mapping, theirs: Mapping, number: int) -> None:
    for name in {**ours, **theirs}:
        found = [side[name].shape if name in side else None for side in (ours, theirs)]
        if found[0] != found[1]:
            raise ValueError(
                f"PipelineModel: block {number} has {name} of shape {found[1]}, block "
                f"0 of {found[0]}; blocks are stacked, so their parameters must be "
                "equal in name and shape. Move what differs to embed or head."
            )


def _check_equal_programs(blocks: Sequence[Network], call: Call) -> None:
    """Raise for blocks of equal parameters and different computations."""
    if len(blocks) == 1:
        return
    first, *others = (program_of(block, call) for block in blocks)
    for number, program in enumerate(others, start=1):
        if program != first:
            raise ValueError(
                f"PipelineModel: block {number} computes something else than block 0 "
                "with parameters of equal shapes; all blocks run block 0's program, "
                "and only their initialisation may differ."
            )


def _check_keywords(call: Call, hidden: PyTree, **parts: Network) -> None:
    """Raise for keywords of the model's call that no part takes."""
    taken = {
        part: keywords_of(network, call if part == "embed" else call.passing(hidden))
        for part, network in parts.items()
    }
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


def _check_block_output(given: PyTree, returned: PyTree) -> None:
    def kinds(part: PyTree) -> list[tuple]:
        return [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(part)]

    same = jax.tree.structure(given) == jax.tree.structure(returned)
    if not same or kinds(given) != kinds(returned):
        raise ValueError(
            f"PipelineModel: block is given {kinds(given)} (shape, dtype) and returns "
            f"{kinds(returned)}; a block's output is the next one's input, so they "
            "must be alike. Change widths and dtypes in embed or head."
        )
