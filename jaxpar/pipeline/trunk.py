"""What does a stage do with a micro-batch: embed it, run a chunk, compute its loss.

Pure functions of a micro-batch's number; whoever calls them decides where they run.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.gradients import Sums, loss_sums, microbatch_rows
from jaxpar.parts.calls import Call, ModelProxy, inputs_of
from jaxpar.parts.network import PipelineNetwork
from jaxpar.pipeline.stages import Stages
from jaxpar.types import Batch, LossFn, Params, PyTree


@dataclasses.dataclass(frozen=True)
class Trunk:
    """A chunk's work on one stage, and the ends', as pure functions.

    Attributes:
      network: the model's parts.
      loss_fn: the user's.
      stages: which blocks are where.
      accumulate: micro-batches.
      training: or evaluating.
      platform: the mesh's.
    """

    network: PipelineNetwork
    loss_fn: LossFn
    stages: Stages
    accumulate: int
    training: bool
    platform: str

    @property
    def _policy(self) -> str:
        # The backward runs the chunk again from its input: "full" once more, by block,
        # would run every block a third time.
        policy = self.network.remat
        return "none" if policy == "full" else policy

    def rows(self, batch: Batch, index: jax.Array) -> Batch:
        """A micro-batch."""
        return microbatch_rows(batch, index, self.accumulate)

    def call(self, batch: Batch, index: jax.Array) -> Call:
        """What loss_fn calls the model with for a micro-batch."""
        rows = self.rows(batch, index)
        return inputs_of(self.loss_fn, rows, training=self.training)

    def embed(
        self, params: Params, batch: Batch, index: jax.Array, key: jax.Array
    ) -> PyTree:
        """Embed a micro-batch."""
        key = jax.random.fold_in(key, index)
        call = self.call(batch, index)
        return self.network.run_embed(params, call, key, training=self.training)

    def head(
        self,
        params: tuple[Params, dict[str, jax.Array]],
        hidden: PyTree,
        batch: Batch,
        index: jax.Array,
        key: jax.Array,
    ) -> Sums:
        """The loss of a micro-batch, from what the last block returned."""
        key = jax.random.fold_in(key, index)
        rows = self.rows(batch, index)

        def answer(call: Call) -> Any:
            return self.network.run_head(
                *params, hidden, call, key, training=self.training
            )

        out = self.loss_fn(ModelProxy(answer, training=self.training), rows)
        return loss_sums(out, rows)

    def block(
        self,
        params: Params,
        hidden: PyTree,
        number: jax.Array,
        is_run: jax.Array,
        call: Call,
        key: jax.Array,
    ) -> PyTree:
        """Run one block; in an idle place, pass `hidden` on."""
        out = self.network.run_block(
            params,
            hidden,
            number,
            call,
            key,
            training=self.training,
            policy=self._policy,
        )
        return optax.tree.where(is_run, out, hidden) if self.stages.idle_places else out

    def places(
        self, virtual: jax.Array, batch: Batch, index: jax.Array, key: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[Call, jax.Array]]:
        """What a virtual stage's blocks are given besides their input.

        Returns:
          By place, [n]: the block's number and whether it is run; and for all of them
          the call of the model and the micro-batch's key.
        """
        places = jnp.arange(self.stages.places)
        numbers = jnp.asarray(self.stages.firsts)[virtual] + places
        is_run = places < jnp.asarray(self.stages.counts)[virtual]
        shared = (self.call(batch, index), jax.random.fold_in(key, index))
        return (numbers, is_run), shared
