"""How are an embedding, sections of blocks and a head run: each as a pure function.

Each part has its own key, made from the micro-batch's key and the part's number, so it
draws the same dropout masks on any number of stages.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import tree
from jaxpar.model.bridge import Network
from jaxpar.model.proxies import Call, refuse_reading, run_part
from jaxpar.model.remat import remat
from jaxpar.sharding.rules import AxisRules
from jaxpar.types import Batch, LossFn, Params, PyTree

LAYERS = "layers"
"""The logical name of the dim along which blocks are stacked."""


@dataclasses.dataclass(frozen=True, eq=False)
class SectionNetwork:
    """Equal blocks, one after the other, and the part that runs once before them.

    Attributes:
      name: under which the parameters are.
      num_blocks: L of this section.
      first: blocks of the sections before.
      blocks: one network for all blocks, or one for each.
      before: shapes of the hidden state that the section before returns.
      hidden: shapes of the hidden state between its blocks.
      between: the part that turns the first into the second; None for none.
      between_name: under which that part's parameters are.
    """

    name: str
    num_blocks: int
    first: int
    blocks: Sequence[Network]
    before: PyTree
    hidden: PyTree
    between: Network | None = None
    between_name: str = ""

    def init(self, keys: jax.Array) -> Params:
        """Make the blocks' parameters, [L, ...]; each block has its own key of [L]."""
        if len(self.blocks) == 1:
            return jax.vmap(lambda key: self.blocks[0].init(key)[0])(keys)
        drawn = [n.init(k)[0] for n, k in zip(self.blocks, keys, strict=True)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *drawn)


@dataclasses.dataclass(frozen=True, eq=False)  # A jit may be keyed by it.
class PipelineNetwork:
    """A `PipelineModel` as pure functions: a `jaxpar.model.bridge.Network`.

    Parameters are ``{"embed": ..., "blocks": ..., "head": ...}``, with a section's name
    for "blocks"; every leaf of a section's blocks is [L, ...]. There is no other state.

    Attributes:
      sections: the blocks.
      keywords: those that any part takes; None if one takes all.
      tied_paths: path in the head -> path in the embedding, for tied parameters.
      remat: the blocks' policy.
      remat_names: labels to save, for "save-names".
      unroll: blocks per iteration of the loop over a section, on one stage.
      allow_uneven: whether stages may store much more than an even division.
      former_names: names of parameters in older checkpoints, as `PipelineModel` has.
      embed: the embedding's network.
      head: the head's network.
    """

    sections: tuple[SectionNetwork, ...]
    keywords: frozenset[str] | None
    tied_paths: Mapping[str, str]
    remat: str
    remat_names: tuple[str, ...]
    unroll: int
    allow_uneven: bool
    former_names: tuple[tuple[str, str], ...]
    embed: Network
    head: Network

    @property
    def num_blocks(self) -> int:
        """Blocks of all sections."""
        return sum(section.num_blocks for section in self.sections)

    @property
    def axis_rules(self) -> AxisRules:
        """The embedding's, which all parts share."""
        return self.embed.axis_rules

    def init(self, key: jax.Array) -> tuple[Params, PyTree]:
        """Make the parameters; each block has its own key."""
        L = self.num_blocks
        embed, _ = self.embed.init(jax.random.fold_in(key, L))
        head, _ = self.head.init(jax.random.fold_in(key, L + 1))
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(L))
        params = {"embed": embed}
        for section in self.sections:
            last = section.first + section.num_blocks
            if section.between is not None:
                own = self._between_key(section, key)
                params[section.between_name], _ = section.between.init(own)
            params[section.name] = section.init(keys[section.first : last])
        for path in self.tied_paths:
            head = _without(head, path.split("/"))
        return {**params, "head": head}, {}

    def dim_names(self) -> dict[str, Sequence[Any] | None]:
        """The parts' dim names, with "layers" before a block's."""
        found = _below("embed", self.embed.dim_names())
        for section in self.sections:
            if section.between is not None:
                found |= _below(section.between_name, section.between.dim_names())
            names = section.blocks[0].dim_names().items()
            stacked = {path: (LAYERS, *(own or ())) for path, own in names}
            found |= _below(section.name, stacked)
        head = self.head.dim_names().items()
        own = {path: names for path, names in head if path not in self.tied_paths}
        return found | _below("head", own)

    def run(
        self,
        fn: LossFn,
        variables: tuple[Params, PyTree],
        key: jax.Array,
        batch: Batch,
        *,
        training: bool,
        step: Any = None,
    ) -> tuple[Any, PyTree]:
        """Run embedding, blocks (each section as one scan) and head."""
        params, state = variables
        model = WholeModel(self, params, key, training=training, step=step)
        return fn(model, batch), state

    def run_embed(
        self, params: Params, call: Call, key: jax.Array, *, training: bool
    ) -> PyTree:
        """Run the embedding.

        Args:
          params: the embedding's own.
          call: the arguments of loss_fn's call.
          key: the micro-batch's.
          training: False to evaluate.

        Returns:
          The first block's input.
        """
        key = jax.random.fold_in(key, self.num_blocks)
        return run_part(self.embed, params, call, key, training=training)

    def run_between(
        self,
        section: SectionNetwork,
        params: Params,
        hidden: PyTree,
        call: Call,
        key: jax.Array,
        *,
        training: bool,
    ) -> PyTree:
        """Run the part before a section, on what the section before returned."""
        if section.between is None:
            return hidden
        key = self._between_key(section, key)
        own = call.passing(hidden)
        return run_part(section.between, params, own, key, training=training)

    def run_block(
        self,
        section: SectionNetwork,
        params: Params,
        hidden: PyTree,
        index: jax.Array,
        call: Call,
        key: jax.Array,
        *,
        training: bool,
        policy: str,
        in_loop: bool = True,
    ) -> PyTree:
        """Run block `index` of a section by a remat policy."""

        def block(params: Params, hidden: PyTree, call: Call, key: jax.Array) -> PyTree:
            own = call.passing(hidden)
            return run_part(section.blocks[0], params, own, key, training=training)

        key = jax.random.fold_in(key, section.first + index)
        names = self.remat_names if policy == "save-names" else ()
        run = remat(block, policy, names=names, prevent_cse=not in_loop)
        return run(params, hidden, call, key)

    def run_head(
        self,
        params: Params,
        tied: Mapping[str, jax.Array],
        hidden: PyTree,
        call: Call,
        key: jax.Array,
        *,
        training: bool,
    ) -> Any:
        """Run the head.

        Args:
          params: the head's own.
          tied: path in the head -> the embedding's array.
          hidden: the last block's output.
          call: the arguments of loss_fn's call.
          key: the micro-batch's.
          training: False to evaluate.

        Returns:
          The result of the model's call.
        """
        for path, leaf in tied.items():
            params = _with(params, path.split("/"), leaf)
        key = jax.random.fold_in(key, self.num_blocks + 1)
        return run_part(self.head, params, call.passing(hidden), key, training=training)

    def tied(self, embed_params: Params) -> dict[str, jax.Array]:
        """Path in the head -> the array that it shares with the embedding."""
        named = tree.named_leaves(embed_params)
        return {head: named[own] for head, own in self.tied_paths.items()}

    def _between_key(self, section: SectionNetwork, key: jax.Array) -> jax.Array:
        place = self.sections.index(section)
        return jax.random.fold_in(key, self.num_blocks + 1 + place)


@jax.tree_util.register_pytree_node_class
class WholeModel:
    """A `PipelineModel` with its parameters, run on one stage: a function and a pytree.

    The `model` of loss_fn, and the result of `Engine.model` and `PipelineModel.init`,
    which may be an argument of a jitted function.

    Args:
      network: the model's network.
      params: all parameters.
      key: of the random numbers of a training step; a micro-batch's.
      training: whether this is a training step.
      step: the number of the step that modules see; None for 0.
    """

    def __init__(
        self,
        network: PipelineNetwork,
        params: Params,
        key: jax.Array,
        step: Any = None,
        *,
        training: bool,
    ):
        self._network, self.params, self._key = network, params, key
        self._step = step
        self._num_calls, self.training = 0, training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run embedding, blocks and head; each call draws its own dropout masks."""
        key, call = self._next_key(), self._call(args, kwargs)
        return self._head(self._hidden(call, key), call, key)

    def run_blocks(self, *args: Any, **kwargs: Any) -> PyTree:
        """Run embedding and blocks.

        Args:
          *args: as in a call.
          **kwargs: as in a call.

        Returns:
          The head's input.
        """
        return self._hidden(self._call(args, kwargs), self._next_key())

    def run_head(self, hidden: PyTree, **kwargs: Any) -> Any:
        """Run the head.

        Args:
          hidden: the result of `run_blocks`, or a part of it.
          **kwargs: as in a call.

        Returns:
          What a call returns.
        """
        return self._head(hidden, self._call((), kwargs), self._next_key())

    def with_params(self, params: Params) -> "WholeModel":
        """The same model with other parameters, of the same names."""
        given = self._network, params, self._key, self._step
        return WholeModel(*given, training=self.training)

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """The arrays, and what is static."""
        return (self.params, self._key, self._step), (self._network, self.training)

    @classmethod
    def tree_unflatten(cls, static: tuple, arrays: tuple) -> "WholeModel":
        """Undo `tree_flatten`."""
        # Not by `__init__`: JAX unflattens with placeholders, too.
        model = object.__new__(cls)
        model._network, model.training = static
        model.params, model._key, model._step = arrays
        model._num_calls = 0
        return model

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Call:
        known = self._network.keywords
        for name in kwargs:
            if known is not None and name not in known:
                raise TypeError(
                    f"model: no part takes the keyword {name}=; they take "
                    f"{', '.join(sorted(known)) or 'none'}."
                    f"{tree.near_match(name, known)}"
                )
        return Call(args, kwargs, self._step)

    def _next_key(self) -> jax.Array:
        key, calls = self._key, self._num_calls
        self._num_calls += 1
        if not calls:
            return key
        # After the numbers that the parts of the first call fold in.
        parts = self._network.num_blocks + len(self._network.sections)
        return jax.random.fold_in(key, parts + calls)

    def _hidden(self, call: Call, key: jax.Array) -> PyTree:
        network, params, how = self._network, self.params, {"training": self.training}
        hidden = network.run_embed(params["embed"], call, key, **how)
        for section in network.sections:
            own = params.get(section.between_name)
            hidden = network.run_between(section, own, hidden, call, key, **how)
            hidden = self._run_section(section, hidden, call, key)
        return hidden

    def _run_section(
        self, section: SectionNetwork, hidden: PyTree, call: Call, key: jax.Array
    ) -> PyTree:
        network = self._network
        unroll = min(network.unroll, section.num_blocks)

        def step(hidden: PyTree, layer: tuple) -> tuple[PyTree, None]:
            block, index = layer
            out = network.run_block(
                section,
                block,
                hidden,
                index,
                call,
                key,
                training=self.training,
                policy=network.remat,
                in_loop=unroll < section.num_blocks,
            )
            return out, None

        layers = (self.params[section.name], jnp.arange(section.num_blocks))
        return jax.lax.scan(step, hidden, layers, unroll=unroll)[0]

    def _head(self, hidden: PyTree, call: Call, key: jax.Array) -> Any:
        params, tied = self.params, self._network.tied(self.params["embed"])
        return self._network.run_head(
            params["head"], tied, hidden, call, key, training=self.training
        )

    def __getattr__(self, name: str) -> Any:
        refuse_reading(name)


def _below(part: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """Paths in a part as paths in the model."""
    return {f"{part}/{path}": own for path, own in names.items()}


def _without(params: Params, path: Sequence[str]) -> Params:
    """A nested dict without one leaf, and without dicts that become empty."""
    rest = {key: value for key, value in params.items() if key != path[0]}
    if len(path) > 1:
        inner = _without(params[path[0]], path[1:])
        return rest | ({path[0]: inner} if inner else {})
    return rest


def _with(params: Params, path: Sequence[str], leaf: jax.Array) -> Params:
    """A nested dict with one more leaf."""
    if len(path) == 1:
        return {**params, path[0]: leaf}
    inner = _with(params.get(path[0], {}), path[1:], leaf)
    return {**params, path[0]: inner}
