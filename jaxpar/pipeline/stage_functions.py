"""What does a stage do with a micro-batch: embed it, run a chunk, compute its loss.

Pure functions of a micro-batch's index; the caller decides where they run.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.model.network import PipelineNetwork
from jaxpar.model.proxies import Call, ModelProxy, inputs_of
from jaxpar.pipeline.stages import Stages
from jaxpar.step.gradients import microbatch_rows
from jaxpar.step.inputs import Inputs, num_rows, twice_the_rows
from jaxpar.step.loss import Loss, Sums, loss_sums
from jaxpar.step.row_draws import Draws, Rows, ShardKey
from jaxpar.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class StageFunctions:
    """Embedding, block and head as pure functions.

    Attributes:
      network: embedding, blocks and head.
      loss: the loss function.
      stages: which blocks are on which stage.
      accumulate: micro-batches.
      training: False to evaluate.
      platform: the mesh's platform.
      draws: how random numbers are drawn.
    """

    network: PipelineNetwork
    loss: Loss
    stages: Stages
    accumulate: int
    training: bool
    platform: str
    draws: Draws

    @property
    def _policy(self) -> str:
        # The backward already recomputes the chunk from its input; "full" on each block
        # would run every block a third time.
        policy = self.network.remat
        return "none" if policy == "full" else policy

    def rows(self, inputs: Inputs, index: jax.Array) -> Inputs:
        """Select a micro-batch."""
        return microbatch_rows(inputs, index, self.accumulate)

    def embed(
        self, params: Params, inputs: Inputs, index: jax.Array, key: ShardKey
    ) -> PyTree:
        """Embed a micro-batch."""
        rows = self.rows(inputs, index)

        def twice() -> tuple:
            return params, twice_the_rows(rows)

        own = Rows(num_rows(rows), twice)
        return self.draws.call(self._embed, key.fold_in(index), (params, rows), own)

    def head(
        self,
        params: tuple[Params, dict[str, jax.Array]],
        hidden: PyTree,
        inputs: Inputs,
        index: jax.Array,
        key: ShardKey,
    ) -> Sums:
        """The loss of a micro-batch, from the last block's output."""
        rows = self.rows(inputs, index)

        def twice() -> tuple:
            wide = twice_the_rows(rows)
            return params, self._hidden_of(wide), wide

        args, own = (params, hidden, rows), Rows(num_rows(rows), twice)
        return self.draws.call(self._head, key.fold_in(index), args, own)

    def block_on(self, rows: Inputs) -> Callable[..., PyTree]:
        """Make ``(params, hidden, number, is_run, call, key) -> hidden``: one block.

        In an idle place it returns `hidden`.

        Args:
          rows: a micro-batch; only its shapes are used.
        """

        def block(params, hidden, number, is_run, call, key):
            def twice() -> tuple:
                wide = twice_the_rows(rows)
                call_of = jax.eval_shape(self._call, key.key, wide)
                return params, self._hidden_of(wide), number, call_of

            args, own = (params, hidden, number, call), Rows(num_rows(rows), twice)
            out = self.draws.call(self._block, key, args, own)
            if self.stages.idle_places:
                return optax.tree.where(is_run, out, hidden)
            return out

        return block

    def _call(self, key: jax.Array, rows: Inputs) -> Call:
        """The arguments with which the loss function calls the model."""
        loss = functools.partial(self.loss, key=key, training=self.training)
        return inputs_of(loss, rows, training=self.training)

    def _embed(self, key: jax.Array, params: Params, rows: Inputs) -> PyTree:
        call = self._call(key, rows)
        return self.network.run_embed(params, call, key, training=self.training)

    def _block(
        self,
        key: jax.Array,
        params: Params,
        hidden: PyTree,
        number: jax.Array,
        call: Call,
    ) -> PyTree:
        return self.network.run_block(
            params,
            hidden,
            number,
            call,
            key,
            training=self.training,
            policy=self._policy,
        )

    def _head(
        self, key: jax.Array, params: tuple[Params, Any], hidden: PyTree, rows: Inputs
    ) -> Sums:
        def answer(call: Call) -> Any:
            own, tied = params
            return self.network.run_head(
                own, tied, hidden, call, key, training=self.training
            )

        model = ModelProxy(answer, training=self.training)
        out = self.loss(model, rows, key=key, training=self.training)
        return loss_sums(out, rows)

    def _hidden_of(self, rows: Inputs) -> PyTree:
        """The shapes of the hidden state."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        params, _ = jax.eval_shape(self.network.init, key)
        return jax.eval_shape(self._embed, key, params["embed"], rows)

    def places(
        self, virtual: jax.Array, inputs: Inputs, index: jax.Array, key: ShardKey
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[Call, ShardKey]]:
        """Arguments of a virtual stage's blocks besides their input.

        Returns:
          By place, [n]: the block's index and whether it is run; and for all blocks the
          call of the model and the micro-batch's key.
        """
        places = jnp.arange(self.stages.places)
        numbers = jnp.asarray(self.stages.firsts)[virtual] + places
        is_run = places < jnp.asarray(self.stages.counts)[virtual]
        rows, key = self.rows(inputs, index), key.fold_in(index)
        own = Rows(num_rows(rows), lambda: (twice_the_rows(rows),))
        call = self.draws.call(self._call, key, (rows,), own)
        return (numbers, is_run), (call, key)
