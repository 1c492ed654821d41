"""What are the inputs of a step in which several batches are under way?

A micro-batch has its own batch's rows, step number and key, the same as in a step of
that batch alone.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpar.mesh import DATA
from jaxpar.sharding.constrain import constrain
from jaxpar.step.inputs import Inputs, make_inputs
from jaxpar.step.row_draws import ShardKey


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window(Inputs):
    """The batches under way, the oldest first.

    Attributes:
      batch: their rows, [batches, rows, ...].
      step: [batches]: the numbers of the steps that they were given to.
    """

    def microbatch(self, index: jax.Array | int, accumulate: int) -> Inputs:
        """Select micro-batch m of batch b by number: b `accumulate` + m."""
        batch, own = jnp.divmod(jnp.maximum(index, 0), accumulate)

        def pick(x: jax.Array) -> jax.Array:
            split = x.reshape(len(x), -1, accumulate, *x.shape[2:])
            rows = jax.lax.dynamic_index_in_dim(split, batch, 0, keepdims=False)
            return constrain(jax.lax.dynamic_index_in_dim(rows, own, 1, False), DATA)

        return make_inputs(jax.tree.map(pick, self.batch), self.step[batch])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowKey(ShardKey):
    """The keys of the steps that the batches under way were given to.

    Attributes:
      key: [batches].
      shard: the data shard's number.
      accumulate: micro-batches of a batch.
    """

    accumulate: int = dataclasses.field(default=1, metadata={"static": True})

    def fold_in(self, number: jax.Array | int) -> ShardKey:
        """The key of a micro-batch by its number in the window."""
        batch, own = jnp.divmod(jnp.maximum(number, 0), self.accumulate)
        return ShardKey(self.key[batch], self.shard).fold_in(own)
