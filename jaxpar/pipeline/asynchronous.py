"""How does an asynchronous schedule compute gradients and moderate updates?

Its step runs the ticks of one steady step: the oldest batch under way ends, whose
gradients the step returns, and its own batch enters.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpar.mesh import on_abstract_mesh, rows_spec
from jaxpar.model.model_state import Variables
from jaxpar.pipeline.asynchronous_checks import check_asynchronous
from jaxpar.pipeline.executor import Carry, Executor
from jaxpar.pipeline.gradients import Pipeline
from jaxpar.pipeline.in_flight import (
    PART,
    Flight,
    InFlight,
    num_places,
    steady_table,
)
from jaxpar.pipeline.schedules.asynchronous import Asynchronous
from jaxpar.pipeline.schedules.table import kept
from jaxpar.pipeline.sections import Sections
from jaxpar.pipeline.tick_table import TickRows, TickTable
from jaxpar.pipeline.versions import OneBatch, SeveralBatches
from jaxpar.pipeline.window import Window, WindowKey
from jaxpar.step.carried import Carried
from jaxpar.step.gradients import gradients_on_shards
from jaxpar.step.inputs import make_inputs
from jaxpar.step.loss import Loss, Sums
from jaxpar.step.partition import Partition
from jaxpar.step.update import Update
from jaxpar.types import Batch, Params, PyTree


@dataclasses.dataclass(frozen=True)
class AsynchronousPipeline(Pipeline, abc.ABC):
    """A schedule whose steps leave batches under way.

    `Pipeline.schedule` is its step in the steady state. What differs between schedules
    is the second version of the parameters: see `StashedPipeline` for a kind.

    Attributes:
      kind: which schedule, with its settings.
    """

    kind: Asynchronous

    batches: ClassVar[type[SeveralBatches]]
    """Which parameters a piece of work uses, and where its results are added."""

    @abc.abstractmethod
    def delays(self) -> tuple[float, float]:
        """The least and the greatest delay of a stage's forwards, in updates."""

    @abc.abstractmethod
    def part_of_second(
        self, params: Params, partition: Partition
    ) -> tuple[Carried, ...]:
        """What is carried to make the second version of the parameters.

        Args:
          params: shapes of the parameters that are trained.
          partition: how the loss function is run from shards.
        """

    @abc.abstractmethod
    def second(
        self, params: Params, carry: Mapping[str, PyTree], partition: Partition
    ) -> Params:
        """The second version of the parameters, in the dtype of the computation.

        Args:
          params: the newest, fp32.
          carry: what is carried, by name.
          partition: how the loss function is run from shards.
        """

    @property
    def delay(self) -> int:
        """See `NothingBetweenSteps`."""
        return self.schedule.delay

    @property
    def synchronous_steps(self) -> int:
        """See `NothingBetweenSteps`."""
        return self.kind.synchronous_steps

    @property
    def versions(self) -> int:
        """See `NothingBetweenSteps`."""
        return 2

    def took_batch(self, carry: Mapping[str, PyTree]) -> jax.Array:
        """See `NothingBetweenSteps`: the oldest one that is under way ends."""
        return carry[PART].is_there[:, 0].all()

    def _schedule_lines(self) -> tuple[str, ...]:
        own, (least, most) = self.schedule, self.delays()
        late = f"{least:.3g} to {most:.3g} updates"
        if least == most == 1:
            late = "1 update"
        before = "1 step" if own.delay == 1 else f"{own.delay} steps"
        more = 2 * (own.num_stages - 1)
        return (
            f"pipe: {own.name}: {own.num_microbatches} micro-batches a step on "
            f"{own.num_stages} stages take {own.num_ticks} ticks, without a bubble in "
            f"the steady state; a gradient is of parameters {late} old, on average. "
            f"A step ends the batch of {before} before, whose loss it reports. A save "
            f"drains the pipeline, which takes {more} ticks more.",
            f"pipe: between steps a stage holds up to {kept(own).inputs.max()} inputs, "
            f"sums of gradients of {self.under_way.with_gradients} batches, in fp32, "
            "and what its second version of the parameters is made of (carried).",
        )

    @property
    def under_way(self) -> SeveralBatches:
        """The batches of a step."""
        own, M = self.schedule, self.schedule.num_microbatches
        # The oldest ones have backwards in it.
        with_gradients = int(own.backward[..., 0].max()) // M + 1
        return self.batches(M, own.delay + 1, with_gradients)

    def parts(
        self,
        partition: Partition,
        loss: Loss,
        like: tuple[Params, Params],
        batch: Batch,
        update: Update,
    ) -> tuple[Carried, ...]:
        """What is under way, and what makes the second version of the parameters."""
        check_asynchronous(self.kind, partition, update, batch)
        shapes = self._shapes(partition, loss, like, batch)
        leaves = tuple(self.communicated_shardings(partition.on_shard))
        flight = InFlight(shapes, leaves)
        return flight, *self.part_of_second(like[0], partition)

    def make_gradients(
        self,
        partition: Partition,
        loss: Loss,
        like: tuple[Params, Params],
        accumulate: int,
    ) -> Callable[..., tuple[Params, Sums, PyTree, PyTree]]:
        """Compute the gradients of the batch that ends in a step."""
        sections = self._sections(partition, loss, accumulate, training=True)
        leaf_shardings = self.communicated_shardings(partition.on_shard)
        both = _with_second(partition)

        def body(shards, inputs, model_state, key, scale, flight):
            del model_state
            entered = flight.window(inputs, both.shard_key(key), accumulate)
            params, second = self._both(both, like, shards)
            carry = _run_steady(
                sections,
                steady_table(self.schedule, entered.is_there, flight.offset).rows,
                (params, {}),
                (second,),
                self.under_way,
                entered.window,
                entered.keys,
                scale,
                flight.carry,
            )
            weight = partition.collectives.total(carry.sums.loss.weight[0])
            inverse = jnp.where(weight > 0, 1.0 / weight, 0.0)
            grads = [grad * inverse for grad in jax.tree.leaves(_oldest(carry))]
            reduced, _ = partition.reduced_once(leaf_shardings, grads, (), scale)
            stored = self.in_stored_order(partition, reduced)
            sums = entered.oldest(carry.sums).over_data(partition.collectives)
            left = entered.left(carry, flight.offset, num_places(self.schedule))
            return stored, entered.reported(sums), {}, left

        run = gradients_on_shards(both, jax.tree.structure(like[0]), body, PART)

        def gradients(weights, model_state, inputs, key, scale, carry):
            second = self.second(weights[0], carry, partition)
            given = weights[0], (weights[1], second)
            return run(given, model_state, inputs, key, scale, carry)

        return gradients

    def _both(
        self, both: Partition, like: tuple[Params, Params], shards: Sequence[Any]
    ) -> tuple[Params, Params]:
        """The newest parameters and the second version, gathered, by part."""
        whole = self._whole(both, shards)
        count = len(both.leaves)
        newest, second = whole[:-count], whole[-count:]
        structure = jax.tree.structure(like)
        return (
            self._params(structure, newest),
            self._params(structure, [*second, *newest[count:]]),
        )

    def _shapes(
        self,
        partition: Partition,
        loss: Loss,
        like: tuple[Params, Params],
        batch: Batch,
    ) -> Flight:
        """Shapes of what a data shard has under way."""
        accumulate, delay = self.schedule.num_microbatches, self.schedule.delay
        sections = self._sections(partition, loss, accumulate, training=True)
        both = _with_second(partition)

        def body(shards, inputs, key):
            params, second = self._both(both, like, shards)

            def several(x: Any) -> jax.Array:
                x = jnp.asarray(x)
                return jnp.broadcast_to(x, (delay, *x.shape))

            data = jax.random.key_data(key)
            flight = Flight(
                carry=(),
                rows=jax.tree.map(several, inputs.batch),
                steps=several(inputs.step.value),
                keys=several(data),
                is_there=several(False),
                enters=jnp.bool(True),
                offset=jnp.int32(0),
            )
            entered = flight.window(inputs, both.shard_key(key), accumulate)
            table = steady_table(self.schedule, entered.is_there, flight.offset)
            given = sections, table, (params, {}), (second,), self.under_way
            carry = _nothing_under_way(*given, entered.window, entered.keys)
            flight = dataclasses.replace(flight, carry=carry)
            return jax.tree.map(lambda x: x[None], flight)

        def run(weights, batch, step, key):
            given = weights[0], (weights[1], weights[0])
            shards, inputs = both.local_views(given), make_inputs(batch, step)
            mapped = both.mapped(body, rows_spec(both.mesh), apart=True)
            return mapped(shards, inputs, key)

        step = jax.ShapeDtypeStruct((), jnp.int32)
        key = jax.eval_shape(lambda: jax.random.key(0))
        with on_abstract_mesh(partition.mesh):
            found = jax.eval_shape(run, like, batch, step, key)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), found)


def _run_steady(
    sections: Sections,
    rows: TickRows,
    variables: Variables,
    others: tuple[Params, ...],
    versions: OneBatch,
    inputs: Window,
    key: WindowKey,
    scale: jax.Array,
    carry: Carry,
) -> Carry:
    """Run the ticks of a step of an asynchronous schedule.

    Args:
      sections: as for `run_schedule`.
      rows: the ticks; micro-batches are those of the window.
      variables: the newest parameters, and the mutable state, which there is none of.
      others: other versions of the parameters.
      versions: which of them a piece of work uses.
      inputs: this data shard's rows of all batches under way.
      key: the keys of their steps.
      scale: the loss scale.
      carry: what the last step left.

    Returns:
      What it leaves.
    """
    sections = sections.of_step(variables, inputs, key)
    given = sections, *variables, inputs, key, scale, versions, others
    return jax.lax.scan(Executor(*given).tick, carry, rows)[0]


def _nothing_under_way(
    sections: Sections,
    table: TickTable,
    variables: Variables,
    others: tuple[Params, ...],
    versions: OneBatch,
    inputs: Window,
    key: WindowKey,
) -> Carry:
    """What `_run_steady` begins with; the arguments' values don't matter."""
    sections = sections.of_step(variables, inputs, key)
    given = sections, *variables, inputs, key, jnp.float32(1), versions, others
    return Executor(*given).initial(table)


def _with_second(partition: Partition) -> Partition:
    """The partition with a second version of the trained leaves."""
    frozen = (*partition.frozen, *partition.leaves)
    return dataclasses.replace(partition, frozen=frozen)


def _oldest(carry: Any) -> Params:
    """The gradients of the batch that ended."""
    embed, head = jax.tree.map(lambda x: x[0], (carry.embed, carry.head))
    blocks = jax.tree.map(lambda x: x[:, 0], carry.blocks[0])
    return {"embed": embed, "head": head, **blocks}
