"""How are an embedding, sections of blocks and a head run: each as a pure function.

Each part has its own key, made from the micro-batch's key and the part's number, so it
draws the same dropout masks on any number of stages.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import tree
from jaxpar.model.bridge import Network
from jaxpar.model.layer_drop import LayerDrop
from jaxpar.model.model_state import Variables, with_leaves
from jaxpar.model.proxies import Call, refuse_reading, run_named
from jaxpar.model.remat import remat_block
from jaxpar.model.section import LAYERS, SectionNetwork
from jaxpar.model.token_drop import RandomLTD
from jaxpar.model.trainable import Typed
from jaxpar.sharding.rules import AxisRules
from jaxpar.types import Batch, LossFn, Params, PyTree


@dataclasses.dataclass(frozen=True, eq=False)  # A jit may be keyed by it.
class PipelineNetwork:
    """A `PipelineModel` as pure functions: a `jaxpar.model.bridge.Network`.

    Parameters are ``{"embed": ..., "blocks": ..., "head": ...}``, with a section's name
    for "blocks"; every leaf of a section's blocks is [L, ...]. So is the mutable state
    of the parts that have one. `variables` of a part are its parameters and its state,
    {} for none.

    Attributes:
      sections: the blocks.
      keywords: those that any part takes; None if one takes all.
      tied_paths: path in the head -> path in the embedding, for tied parameters.
      remat: the blocks' policy.
      remat_names: labels to save, for "save-names" and "offload".
      unroll: blocks per iteration of the loop over a section, on one stage.
      allow_uneven: whether stages may store much more than an even division.
      former_names: names of parameters in older checkpoints, as `PipelineModel` has.
      layer_drop, token_drop: which blocks, or tokens of blocks, training leaves out.
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
    layer_drop: LayerDrop | None
    token_drop: RandomLTD | None
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

    @property
    def parts(self) -> dict[str, Network]:
        """Key of the parameters -> a part's network; of a section, a block's."""
        found = {"embed": self.embed}
        for own in self.sections:
            if own.between is not None:
                found[own.between_name] = own.between
            found[own.name] = own.blocks[0]
        return found | {"head": self.head}

    def variable_types(self) -> dict[str, type]:
        """Leaf name -> the Variable's type, of the parts in NNX."""
        typed = {name: x for name, x in self.parts.items() if isinstance(x, Typed)}
        types = [_below(name, own.variable_types()) for name, own in typed.items()]
        return {path: kind for own in types for path, kind in own.items()}

    def init(self, key: jax.Array) -> tuple[Params, PyTree]:
        """Make the parameters and the state; each block has its own key."""
        L = self.num_blocks
        made = {"embed": self.embed.init(jax.random.fold_in(key, L))}
        head = self.head.init(jax.random.fold_in(key, L + 1))
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(L))
        for section in self.sections:
            last = section.first + section.num_blocks
            if section.between is not None:
                own = self._between_key(section, key)
                made[section.between_name] = section.between.init(own)
            made[section.name] = section.init(keys[section.first : last])
        made["head"] = head
        params = {part: own for part, (own, _) in made.items()}
        for path in self.tied_paths:
            params["head"] = tree.without_leaf(params["head"], path.split("/"))
        return params, with_leaves({part: own for part, (_, own) in made.items()})

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
        model = WholeModel(self, variables, key, training=training, step=step)
        return fn(model, batch), model.state

    def run_embed(
        self, variables: Variables, call: Call, key: jax.Array, *, training: bool
    ) -> tuple[PyTree, PyTree]:
        """Run the embedding.

        Args:
          variables: the embedding's own.
          call: the arguments of loss_fn's call.
          key: the micro-batch's.
          training: False to evaluate, which leaves the state as it is.

        Returns:
          The first block's input, and the embedding's state.
        """
        key = jax.random.fold_in(key, self.num_blocks)
        return run_named("embed", self.embed, variables, call, key, training=training)

    def run_between(
        self,
        section: SectionNetwork,
        variables: Variables,
        hidden: PyTree,
        call: Call,
        key: jax.Array,
        *,
        training: bool,
    ) -> tuple[PyTree, PyTree]:
        """Run the part before a section, on what the section before returned."""
        if section.between is None:
            return hidden, {}
        key, own = self._between_key(section, key), call.passing(hidden)
        given = section.between_name, section.between, variables, own, key
        return run_named(*given, training=training)

    def run_block(
        self,
        section: SectionNetwork,
        variables: Variables,
        hidden: PyTree,
        index: jax.Array,
        call: Call,
        key: jax.Array,
        *,
        training: bool,
        policy: str,
        in_loop: bool = True,
    ) -> tuple[PyTree, PyTree]:
        """Run block `index` of a section by a remat policy; also the block's state."""

        def block(
            variables: Variables, hidden: PyTree, call: Call, key: jax.Array
        ) -> tuple[PyTree, PyTree]:
            given = section.blocks[0], variables, call.passing(hidden), key
            return run_named(section.name, *given, training=training)

        place = section.first + index
        if self.token_drop is not None and training:
            block = self.token_drop.dropping(block, place, self.num_blocks)
        key = jax.random.fold_in(key, place)
        names = self.remat_names if policy in ("save-names", "offload") else ()
        run = functools.partial(
            remat_block(block, policy, names=names, prevent_cse=not in_loop),
            *(variables, hidden, call, key),
        )
        if self.layer_drop is None or not training:
            return run()
        before, own = (hidden, variables[1]), (place, self.num_blocks)
        return self.layer_drop.run(run, before, key, call.step, own)

    def run_head(
        self,
        variables: Variables,
        tied: Mapping[str, jax.Array],
        hidden: PyTree,
        call: Call,
        key: jax.Array,
        *,
        training: bool,
    ) -> tuple[Any, PyTree]:
        """Run the head.

        Args:
          variables: the head's own.
          tied: path in the head -> the embedding's array.
          hidden: the last block's output.
          call: the arguments of loss_fn's call.
          key: the micro-batch's.
          training: False to evaluate, which leaves the state as it is.

        Returns:
          The result of the model's call, and the head's state.
        """
        params, state = variables
        for path, leaf in tied.items():
            params = tree.with_leaf(params, path.split("/"), leaf)
        key, own = jax.random.fold_in(key, self.num_blocks + 1), call.passing(hidden)
        return run_named(
            "head", self.head, (params, state), own, key, training=training
        )

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
      variables: all parameters, and the state, which calls in training change.
      key: of the random numbers of a training step; a micro-batch's.
      training: whether this is a training step.
      step: the number of the step that modules see; None for 0.
    """

    def __init__(
        self,
        network: PipelineNetwork,
        variables: Variables,
        key: jax.Array,
        step: Any = None,
        *,
        training: bool,
    ):
        self._network, (self.params, self.state) = network, variables
        self._key = key
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
        given = self._network, (params, self.state), self._key, self._step
        return WholeModel(*given, training=self.training)

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """The arrays, and what is static."""
        arrays = self.params, self.state, self._key, self._step
        return arrays, (self._network, self.training)

    @classmethod
    def tree_unflatten(cls, static: tuple, arrays: tuple) -> "WholeModel":
        """Undo `tree_flatten`."""
        # Not by `__init__`: JAX unflattens with placeholders, too.
        model = object.__new__(cls)
        model._network, model.training = static
        model.params, model.state, model._key, model._step = arrays
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

    def _of(self, part: str) -> Variables:
        """A part's own variables."""
        return self.params.get(part, {}), self.state.get(part, {})

    def _keep(self, part: str, state: PyTree) -> None:
        """Replace a part's state."""
        self.state = with_leaves({**self.state, part: state})

    def _hidden(self, call: Call, key: jax.Array) -> PyTree:
        network, how = self._network, {"training": self.training}
        hidden, state = network.run_embed(self._of("embed"), call, key, **how)
        self._keep("embed", state)
        for section in network.sections:
            own = self._of(section.between_name)
            hidden, state = network.run_between(section, own, hidden, call, key, **how)
            self._keep(section.between_name, state)
            hidden = self._run_section(section, hidden, call, key)
        return hidden

    def _run_section(
        self, section: SectionNetwork, hidden: PyTree, call: Call, key: jax.Array
    ) -> PyTree:
        network = self._network
        unroll = min(network.unroll, section.num_blocks)

        def step(hidden: PyTree, layer: tuple) -> tuple[PyTree, PyTree]:
            variables, index = layer
            return network.run_block(
                section,
                variables,
                hidden,
                index,
                call,
                key,
                training=self.training,
                policy=network.remat,
                in_loop=unroll < section.num_blocks,
            )

        layers = (self._of(section.name), jnp.arange(section.num_blocks))
        hidden, state = jax.lax.scan(step, hidden, layers, unroll=unroll)
        self._keep(section.name, state)
        return hidden

    def _head(self, hidden: PyTree, call: Call, key: jax.Array) -> Any:
        network, tied = self._network, self._network.tied(self._of("embed")[0])
        given = self._of("head"), tied, hidden, call, key
        out, state = network.run_head(*given, training=self.training)
        self._keep("head", state)
        return out

    def __getattr__(self, name: str) -> Any:
        refuse_reading(name)


def _below(part: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """Paths in a part as paths in the model."""
    return {f"{part}/{path}": own for path, own in names.items()}
