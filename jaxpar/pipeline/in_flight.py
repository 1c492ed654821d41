"""What is under way between the steps of an asynchronous schedule, as carried state.

It is of one mesh and one schedule, and no checkpoint holds it: a save first ends what
is under way, and a run that goes on from it begins with nothing.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import PIPE
from jaxpar.pipeline.executor import Carry
from jaxpar.pipeline.schedules.table import IDLE, Schedule
from jaxpar.pipeline.tick_table import TickRows, TickTable
from jaxpar.pipeline.window import Window, WindowKey
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.step.carried import Carried, Stepped
from jaxpar.step.inputs import Inputs
from jaxpar.step.loss import Sums
from jaxpar.step.row_draws import ShardKey
from jaxpar.step.weighted import of_no_examples
from jaxpar.types import Leaf, Params, PyTree

PART = "in_flight"
"""The name in ``state.carried``."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flight:
    """What a data shard has under way between two steps.

    Attributes:
      carry: a `Carry`: buffers of the stages, sums of gradients and losses.
      rows: [D, ...]: the rows of the batches under way, the oldest first.
      steps: [D]: the numbers of their steps.
      keys: [D, ...]: the data of their steps' keys.
      is_there: [D]: whether there is such a batch.
      enters: whether the next step's batch enters; if not, the step drains.
      offset: by how much the places in the buffers are shifted.
    """

    carry: PyTree
    rows: PyTree
    steps: Leaf
    keys: Leaf
    is_there: Leaf
    enters: Leaf
    offset: Leaf

    def window(self, inputs: Inputs, key: ShardKey, accumulate: int) -> "Entered":
        """The batches of a step: those under way, and its own.

        Args:
          inputs: the step's rows, and its number.
          key: its key.
          accumulate: micro-batches of a batch.
        """

        def after(old: jax.Array, new: Any) -> jax.Array:
            return jnp.concatenate([old, jnp.asarray(new)[None]])

        own = jax.random.key_data(key.key)
        keys = after(self.keys, own)
        impl = jax.random.key_impl(key.key)
        wrapped = jax.random.wrap_key_data(keys, impl=impl)
        rows = jax.tree.map(after, self.rows, inputs.batch)
        steps = after(self.steps, inputs.step.value)
        return Entered(
            Window(rows, steps),
            WindowKey(wrapped, key.shard, accumulate=accumulate),
            after(self.is_there, self.enters),
        )


@dataclasses.dataclass(frozen=True)
class Entered:
    """The batches of a step of an asynchronous schedule, D + 1.

    Attributes:
      window: their rows.
      keys: their keys.
      is_there: whether there is such a batch.
    """

    window: Window
    keys: WindowKey
    is_there: jax.Array

    def left(self, carry: Carry, offset: jax.Array, places: int) -> Flight:
        """What is under way after the step.

        Args:
          carry: what its ticks left; the sums of the oldest batch are taken out.
          offset: of the places, in the step.
          places: of the buffers.
        """
        accumulate = self.keys.accumulate

        def next_of(x: jax.Array, axis: int = 0) -> jax.Array:
            rest = jax.lax.slice_in_dim(x, 1, x.shape[axis], axis=axis)
            empty = jnp.zeros_like(jax.lax.slice_in_dim(x, 0, 1, axis=axis))
            return jnp.concatenate([rest, empty], axis=axis)

        embed, head = jax.tree.map(next_of, (carry.embed, carry.head))
        blocks = jax.tree.map(lambda x: next_of(x, 1), carry.blocks)
        weights = carry.weights[accumulate:]
        none = of_no_examples(jax.tree.map(lambda x: x[:1], carry.sums))
        after = dataclasses.replace(
            carry,
            weights=jnp.pad(weights, (0, accumulate)),
            sums=jax.tree.map(lambda x, y: jnp.append(x[1:], y), carry.sums, none),
            embed=embed,
            head=head,
            blocks=blocks,
        )
        return Flight(
            carry=after,
            rows=jax.tree.map(lambda x: x[1:], self.window.batch),
            steps=self.window.step[1:],
            keys=jax.random.key_data(self.keys.key)[1:],
            is_there=self.is_there[1:],
            enters=jnp.bool(True),
            offset=(offset + accumulate) % places,
        )

    def oldest(self, sums: Sums) -> Sums:
        """The losses, so far, of the oldest batch that is there."""
        count = len(jax.tree.leaves(sums)[0])
        number = jnp.minimum(jnp.argmax(self.is_there), count - 1)
        return jax.tree.map(lambda x: x[number], sums)

    def reported(self, sums: Sums) -> Sums:
        """What a step says of its losses: NaN if none is known yet."""
        nothing = dataclasses.replace(
            sums.loss, total=jnp.float32(jnp.nan), weight=jnp.float32(1)
        )
        known = self.is_there[0] | (sums.loss.weight > 0)
        loss = optax.tree.where(known, sums.loss, nothing)
        return dataclasses.replace(sums, loss=loss)


def num_places(schedule: Schedule) -> int:
    """Places of the buffers of inputs: from a micro-batch's forward to its backward."""
    return 2 * schedule.num_stages - 1


def steady_table(
    schedule: Schedule, is_there: jax.Array, offset: jax.Array
) -> TickTable:
    """The rows of a step's ticks, and the sizes of its buffers.

    Args:
      schedule: a step in the steady state, of one chunk a stage.
      is_there: [D + 1]: which batches there are; the work of others is left out.
      offset: of the places in the buffers.
    """
    M, places = schedule.num_microbatches, num_places(schedule)
    last = schedule.num_stages - 1

    def masked(table: np.ndarray) -> jax.Array:
        return jnp.where(is_there[table // M], table, IDLE)

    def where(work: jax.Array, value: Any) -> jax.Array:
        return jnp.where(work == IDLE, IDLE, value).astype(jnp.int32)

    forward = masked(schedule.forward[..., 0])
    backward = masked(schedule.backward[..., 0])
    put = where(forward, (forward + offset) % places)
    read = where(backward, (backward + offset) % places)
    none = jnp.full((schedule.num_ticks, 1), IDLE, jnp.int32)
    no_weights = jnp.zeros((*forward.shape, 0), jnp.int32)
    rows = TickRows(
        forward=where(forward, forward),
        forward_chunk=where(forward, 0),
        forward_place=put,
        forward_kept=put,
        backward=where(backward, backward),
        backward_chunk=where(backward, 0),
        backward_place=read,
        backward_kept=read,
        cotangent_place=where(backward, 0),
        products_place=jnp.full_like(put, IDLE),
        weight=no_weights,
        weight_chunk=no_weights,
        weight_place=no_weights,
        input_arrives=jnp.concatenate([none, put[:, :last]], axis=1),
        cotangent_arrives=jnp.concatenate([where(backward, 0)[:, 1:], none], axis=1),
        embed=where(forward[:, 0], forward[:, 0]),
        head=where(forward[:, last], forward[:, last]),
        head_place=where(forward[:, last], 0),
        embed_backward=where(backward[:, 0], backward[:, 0]),
    )
    return TickTable(rows, places, places, 1, 1)


@dataclasses.dataclass(frozen=True)
class InFlight(Carried):
    """What is under way, as a part of the state.

    Attributes:
      shapes: a `Flight` of shapes.
      leaves: the trained leaves as the stages hold them.
    """

    shapes: Flight
    leaves: tuple[LeafSharding, ...]
    name: str = PART
    per_shard: bool = True
    saved: bool = False
    in_gradients: bool = True

    def init(self, params: Params) -> PyTree:
        """Nothing."""
        del params
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.shapes)
        return dataclasses.replace(empty, enters=jnp.bool(True))

    def at_new_params(self, part: Flight) -> Flight:
        """Nothing: what was under way is of other parameters."""
        return dataclasses.replace(part, is_there=jnp.zeros_like(part.is_there))

    def spec(self, name: str, shape: tuple[int, ...]) -> P:
        """Sums of gradients as their parameters; buffers over pipe."""
        if name.startswith("carry/buffers/"):
            return P(PIPE)
        for leaf in self.leaves:
            if f"/{name}".endswith(f"/{leaf.name}"):
                axis = 0 if leaf.name.split("/")[0] in ("embed", "head") else 1
                return P(*leaf.compute[:axis], None, *leaf.compute[axis:])
        return P()

    def after(self, part: Flight, stepped: Stepped) -> Flight:
        """What the step left."""
        del part
        return stepped.carry[self.name]
