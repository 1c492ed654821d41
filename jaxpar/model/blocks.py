"""What is a model of parts: an embedding, sections of blocks, and a head.

A `PipelineModel` has one tree of parameters on every mesh. On one stage each section
runs as a scan over its stacked blocks, without any pipeline code in the program; on
more, `jaxpar.pipeline` runs the same parts by a schedule.
"""

import dataclasses
import itertools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.model.bridge import make_network
from jaxpar.model.layer_drop import LayerDrop
from jaxpar.model.network import PipelineNetwork, WholeModel
from jaxpar.model.part_checks import (
    check_block_output,
    check_equal_blocks,
    check_equal_programs,
    check_keywords,
    check_ties,
)
from jaxpar.model.proxies import Call, call_part, inputs_of, shape_of
from jaxpar.model.remat import check_policy
from jaxpar.model.section import SectionNetwork
from jaxpar.model.token_drop import RandomLTD
from jaxpar.types import Batch, LossFn, Params, PyTree

_ENDS = ("embed", "head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineModel:
    """An embedding, sections of equal blocks, and a head.

    loss_fn calls ``model(inputs, ...)`` once. Positional arguments go to the embedding;
    keyword arguments, such as positions or segment ids, go to every part whose call
    takes them: arrays, or Python flags, numbers and strings, which stay Python values
    (``training=model.training``). The embedding's output passes through the sections,
    each block called as ``block(hidden)``, to ``head(hidden)``, whose result the call
    returns. `hidden` is an array or a tree of arrays: what a later section needs of an
    earlier one (an encoder's output) stays in it.

    Parts may have mutable state. Each micro-batch of a step changes it, one after the
    other; an evaluation does not. With pipe > 1 it may depend on parameters and on
    itself, not on examples.

    Attributes:
      embed: an NNX factory ``lambda rngs: MyEmbed(rngs=rngs)`` or a Linen module.
      sections: in order, each a pair (block, count). A block is what `embed` is; its
        output has its input's shape and dtype. Or a sequence of `count` of them that
        differ only in their initialisation. Between two pairs may stand a part alone:
        it runs once, and may change the shape. A mapping names them; a single pair is
        named "blocks", others "blocks_0", "between_1", ... by their place.
      head: the same as `embed`.
      tied: parameters that share one array, as (("embed", path), ("head", path)); it
        is stored under the first name.
      remat: one of `jaxpar.model.remat.REMAT_POLICIES`, for each block. In a pipeline
        "none" stores every block's residuals, for each micro-batch in flight; the other
        policies store only a stage's input, and its backward recomputes its blocks:
        once under "full", by block under the others.
      remat_names: labels to save, for "save-names" and "offload".
      unroll: blocks per iteration of the loop over a section, on one stage; the largest
        count removes the loops.
      allow_uneven: run on a pipeline that can't divide the blocks evenly, though its
        stages then store more than 1.25 x the parameters of an even division.
      former_names: parameters that older checkpoints hold under another name, as pairs
        (name now, name then); both may end in ``/*``.
      layer_drop: blocks that training steps leave out by chance, the same in all rows
        of a micro-batch; None for none.
      token_drop: which blocks see a random part of the tokens in training steps, the
        same in all rows of a micro-batch; None for none.

    Raises:
      ValueError: if a number, a policy, a section or a tie is invalid.

    Example:
      >>> from flax import nnx
      >>> model = PipelineModel(
      ...     embed=lambda rngs: nnx.Linear(4, 8, rngs=rngs),
      ...     sections=[(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 6)],
      ...     head=lambda rngs: nnx.Linear(8, 1, rngs=rngs),
      ... )
    """

    embed: Any
    sections: Sequence[Any] | Mapping[str, Any]
    head: Any
    tied: tuple[tuple[tuple[str, str], tuple[str, str]], ...] | tuple = ()
    remat: str = "full"
    remat_names: tuple[str, ...] = ()
    unroll: int = 1
    allow_uneven: bool = False
    former_names: tuple[tuple[str, str], ...] = ()
    layer_drop: LayerDrop | None = None
    token_drop: RandomLTD | None = None

    def __post_init__(self):
        check_policy(self.remat, self.remat_names)
        _check_order(self._named)
        most = max(self.counts.values())
        if not 1 <= self.unroll <= most:
            raise ValueError(
                f"PipelineModel: unroll={self.unroll} must be between 1 and "
                f"{most}, the largest count, which removes the loops."
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
    def counts(self) -> dict[str, int]:
        """Name of a section -> its blocks."""
        named = self._named.items()
        return {name: given[1] for name, given in named if _is_pair(given)}

    @property
    def _named(self) -> dict[str, Any]:
        """The sections, and the parts between them, by name."""
        if isinstance(self.sections, Mapping):
            return dict(self.sections)
        given = list(self.sections)
        if len(given) == 1:
            return {"blocks": given[0]}
        return {
            f"{'blocks' if _is_pair(part) else 'between'}_{place}": part
            for place, part in enumerate(given)
        }

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

        network = self.make_network(_call_whole, Call(args, kwargs))
        key = jax.random.key(seed)
        return WholeModel(network, jax.jit(network.init)(key), key, training=False)

    def with_state(self, params: Params, *args: Any, **kwargs: Any) -> WholeModel:
        """Make a model of given parameters that keeps its mutable state in calls.

        As in training, where dropout is on, too.

        Args:
          params: all of the model's.
          *args: of a call of the model: arrays or `jax.ShapeDtypeStruct`s.
          **kwargs: likewise.

        Returns:
          The model; its state begins as zeros, floats in the parameters' dtype.
        """
        network = self.make_network(_call_whole, Call(args, kwargs))
        key = jax.random.key(0)
        dtype = jax.tree.leaves(params)[0].dtype

        def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
            is_float = jnp.issubdtype(like.dtype, jnp.floating)
            return jnp.zeros(like.shape, dtype if is_float else like.dtype)

        state = jax.tree.map(zeros, jax.eval_shape(network.init, key)[1])
        return WholeModel(network, (params, state), key, training=True)

    def make_network(self, loss_fn: LossFn, sample_batch: Batch) -> PipelineNetwork:
        """Bridge to the parts (see `jaxpar.model.bridge.make_network`)."""
        call = jax.eval_shape(
            lambda batch: inputs_of(loss_fn, batch, training=True), sample_batch
        )
        embed = make_network(self.embed, call_part, call)
        hidden = shape_of(embed, call)
        sections, hidden = self._make_sections(hidden, call)
        head = make_network(self.head, call_part, call.passing(hidden))
        check_ties(embed, head, self.tied_paths)
        if self.token_drop is not None:
            self.token_drop.check(sections, call)
        keywords = check_keywords(call, embed, sections, head, hidden)
        return PipelineNetwork(
            sections,
            keywords,
            self.tied_paths,
            self.remat,
            self.remat_names,
            self.unroll,
            self.allow_uneven,
            self.former_names,
            self.layer_drop,
            self.token_drop,
            embed,
            head,
        )

    def _make_sections(
        self, hidden: PyTree, call: Call
    ) -> tuple[tuple[SectionNetwork, ...], PyTree]:
        """Bridge to the sections; also the shapes that the last one returns."""
        sections: list[SectionNetwork] = []
        joint: dict[str, Any] = {}
        before = hidden
        for name, given in self._named.items():
            if not _is_pair(given):
                between = make_network(given, call_part, call.passing(hidden))
                joint = {"between": between, "between_name": name}
                hidden = shape_of(between, call.passing(hidden))
                continue
            block, count = given
            listed = list(block) if isinstance(block, Sequence) else [block]
            own = call.passing(hidden)
            networks = tuple(make_network(each, call_part, own) for each in listed)
            check_equal_blocks(name, networks)
            check_block_output(name, hidden, shape_of(networks[0], own))
            check_equal_programs(name, networks, own)
            first = sum(section.num_blocks for section in sections)
            sections.append(
                SectionNetwork(name, count, first, networks, before, hidden, **joint)
            )
            joint, before = {}, hidden
        return tuple(sections), hidden


def _call_whole(model: Any, call: Call) -> Any:
    return model(*call.args, **call.kwargs)


def _is_pair(given: Any) -> bool:
    """Whether a section is given, and not a part between two."""
    return (
        isinstance(given, tuple)
        and len(given) == 2
        and isinstance(given[1], numbers.Integral)
    )


def _check_order(named: Mapping[str, Any]) -> None:
    """Raise for sections that can't be run one after the other."""
    pairs = [name for name, given in named.items() if _is_pair(given)]
    if not pairs:
        raise ValueError(
            "PipelineModel: sections has no pair (block, count), such as "
            "sections=[(lambda rngs: Block(rngs=rngs), 12)]."
        )
    kinds = [_is_pair(given) for given in named.values()]
    doubled = any(not (a or b) for a, b in itertools.pairwise(kinds))
    if not kinds[0] or not kinds[-1] or doubled:
        raise ValueError(
            f"PipelineModel: sections are {', '.join(named)}: a part that is not a "
            "pair (block, count) must stand between two pairs. Move what comes first "
            "to embed, what comes last to head, and join two parts in one."
        )
    for name in named:
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(
                f"PipelineModel: a section is named {name!r}; the name is a key of the "
                "parameters: give it letters, and no slash."
            )
    for name in set(_ENDS) & set(named):
        raise ValueError(
            f"PipelineModel: a section can't be named {name!r}, as the model's "
            f"{name} is; name it otherwise."
        )
    for name in pairs:
        block, count = named[name]
        if count < 1:
            raise ValueError(
                f"PipelineModel: section {name!r} has count {count}; it must be at "
                "least 1."
            )
        if isinstance(block, Sequence) and len(block) != count:
            raise ValueError(
                f"PipelineModel: section {name!r} has {len(block)} blocks, but count "
                f"{count}; give one block for all, or one for each."
            )
