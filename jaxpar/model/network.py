"""How are an embedding, stacked blocks and a head run: each as a pure function.

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


@dataclasses.dataclass(frozen=True, eq=False)  # A jit may be keyed by it.
class PipelineNetwork:
    """A `PipelineModel` as pure functions: a `jaxpar.model.bridge.Network`.

    Parameters are ``{"embed": ..., "blocks": ..., "head": ...}``, every leaf of the
    blocks [L, ...]; there is no other state.

    Attributes:
      num_blocks: L.
      tied_paths: path in the head -> path in the embedding, for tied parameters.
      remat: the blocks' policy.
      remat_names: labels to save, for "save-names".
      unroll: blocks per iteration of the loop over them, on one stage.
      former_names: names of parameters in older checkpoints, as `PipelineModel` has.
      embed: the embedding's network.
      blocks: one network for all blocks, or one for each.
      head: the head's network.
    """

    num_blocks: int
    tied_paths: Mapping[str, str]
    remat: str
    remat_names: tuple[str, ...]
    unroll: int
    former_names: tuple[tuple[str, str], ...]
    embed: Network
    blocks: Sequence[Network]
    head: Network

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
        if len(self.blocks) == 1:
            blocks = jax.vmap(lambda key: self.blocks[0].init(key)[0])(keys)
        else:
            drawn = [n.init(k)[0] for n, k in zip(self.blocks, keys, strict=True)]
            blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *drawn)
        for path in self.tied_paths:
            head = _without(head, path.split("/"))
        return {"embed": embed, "blocks": blocks, "head": head}, {}

    def dim_names(self) -> dict[str, Sequence[Any] | None]:
        """The parts' dim names, with "layers" before a block's."""
        stacked = {
            f"blocks/{path}": (LAYERS, *(names or ()))
            for path, names in self.blocks[0].dim_names().items()
        }
        embed = {f"embed/{k}": names for k, names in self.embed.dim_names().items()}
        head = {
            f"head/{path}": names
            for path, names in self.head.dim_names().items()
            if path not in self.tied_paths
        }
        return embed | stacked | head

    def run(
        self,
        fn: LossFn,
        variables: tuple[Params, PyTree],
        key: jax.Array,
        batch: Batch,
        *,
        training: bool,
    ) -> tuple[Any, PyTree]:
        """Run embedding, blocks (as one scan) and head."""
        params, state = variables
        return fn(WholeModel(self, params, key, training=training), batch), state

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

    def run_block(
        self,
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
        """Run block `index` with the given parameters, by a remat policy."""

        def block(params: Params, hidden: PyTree, call: Call, key: jax.Array) -> PyTree:
            own = call.passing(hidden)
            return run_part(self.blocks[0], params, own, key, training=training)

        key = jax.random.fold_in(key, index)
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
    """

    def __init__(
        self,
        network: PipelineNetwork,
        params: Params,
        key: jax.Array,
        *,
        training: bool,
    ):
        self._network, self.params, self._key = network, params, key
        self._num_calls, self.training = 0, training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run embedding, blocks and head; each call draws its own dropout masks."""
        key, call = self._next_key(), Call(args, kwargs)
        return self._head(self._hidden(call, key), call, key)

    def run_blocks(self, *args: Any, **kwargs: Any) -> PyTree:
        """Run embedding and blocks.

        Args:
          *args: as in a call.
          **kwargs: as in a call.

        Returns:
          The head's input.
        """
        return self._hidden(Call(args, kwargs), self._next_key())

    def run_head(self, hidden: PyTree, **kwargs: Any) -> Any:
        """Run the head.

        Args:
          hidden: the result of `run_blocks`, or a part of it.
          **kwargs: as in a call.

        Returns:
          What a call returns.
        """
        return self._head(hidden, Call((), kwargs), self._next_key())

    def with_params(self, params: Params) -> "WholeModel":
        """The same model with other parameters, of the same names."""
        return WholeModel(self._network, params, self._key, training=self.training)

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """The arrays, and what is static."""
        return (self.params, self._key), (self._network, self.training)

    @classmethod
    def tree_unflatten(cls, static: tuple, arrays: tuple) -> "WholeModel":
        """Undo `tree_flatten`."""
        network, training = static
        return cls(network, *arrays, training=training)

    def _next_key(self) -> jax.Array:
        key, calls = self._key, self._num_calls
        self._num_calls += 1
        if not calls:
            return key
        # After the numbers that the parts of the first call fold in.
        return jax.random.fold_in(key, self._network.num_blocks + 1 + calls)

    def _hidden(self, call: Call, key: jax.Array) -> PyTree:
        network, params = self._network, self.params
        hidden = network.run_embed(params["embed"], call, key, training=self.training)

        def step(hidden: PyTree, layer: tuple) -> tuple[PyTree, None]:
            block, index = layer
            out = network.run_block(
                block,
                hidden,
                index,
                call,
                key,
                training=self.training,
                policy=network.remat,
                in_loop=network.unroll < network.num_blocks,
            )
            return out, None

        layers = (params["blocks"], jnp.arange(network.num_blocks))
        return jax.lax.scan(step, hidden, layers, unroll=network.unroll)[0]

    def _head(self, hidden: PyTree, call: Call, key: jax.Array) -> Any:
        params, tied = self.params, self._network.tied(self.params["embed"])
        return self._network.run_head(
            params["head"], tied, hidden, call, key, training=self.training
        )

    def __getattr__(self, name: str) -> Any:
        refuse_reading(name)


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
