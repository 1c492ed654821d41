"""How does a schedule over stages compute gradients and evaluations?"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxpar.mesh import PIPE
from jaxpar.model.network import PipelineNetwork
from jaxpar.pipeline.block_cost import (
    BlockWork,
    cost_of,
    times_of,
)
from jaxpar.pipeline.chunks import Chunks
from jaxpar.pipeline.executor import run_forwards, run_schedule
from jaxpar.pipeline.schedules.interleaved import make_in_groups
from jaxpar.pipeline.schedules.table import Schedule, kept
from jaxpar.pipeline.stage_functions import StageFunctions
from jaxpar.pipeline.stages import Stages, is_stacked
from jaxpar.pipeline.tick_table import make_tick_table
from jaxpar.sharding.rules import Spec, axes_of
from jaxpar.sharding.zero import LeafSharding, ZeroStage, shard_leaves
from jaxpar.step.gradients import (
    Partition,
    evaluation_on_shards,
    gradients_on_shards,
)
from jaxpar.step.inputs import num_rows
from jaxpar.step.loss import Loss, Sums
from jaxpar.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A schedule over stages.

    Attributes:
      network: embedding, blocks and head.
      schedule: the schedule.
      stages: which blocks are on which stage.
      block: a block's cost.
    """

    network: PipelineNetwork
    schedule: Schedule
    stages: Stages
    block: BlockWork

    def shard_leaves(
        self,
        leaves: Mapping[str, jax.ShapeDtypeStruct],
        compute: Mapping[str, Spec],
        zero: ZeroStage,
        sizes: Mapping[str, int],
        allow_whole: Sequence[str],
    ) -> dict[str, LeafSharding]:
        """Shard leaves; stacks over pipe, if they are stored in the stages' order."""
        stacks = tuple(filter(is_stacked, leaves))
        if not self.stages.in_order:
            return shard_leaves(leaves, compute, zero, sizes, allow_whole, stacks)
        split = {name: (PIPE, *compute[name][1:]) for name in stacks}
        return shard_leaves(leaves, {**compute, **split}, zero, sizes, allow_whole)

    def make_gradients(
        self,
        partition: Partition,
        loss: Loss,
        params_like: Params,
        accumulate: int,
    ) -> Callable[..., tuple[Params, Sums, PyTree]]:
        """Compute gradients by the schedule.

        At every ZeRO stage parameters are gathered, and gradients reduced, once a step.
        """
        structure = jax.tree.structure(params_like)
        chunks = self._chunks(partition, loss, accumulate, training=True)
        table = make_tick_table(self.schedule, training=True, keeps=chunks.keeps)
        leaf_shardings = self.communicated_shardings(partition.leaves)

        def body(shards, inputs, model_state, key, scale):
            key = partition.shard_key(key)
            params = jax.tree.unflatten(structure, self._whole(partition, shards))
            grads, sums = run_schedule(chunks, table, params, inputs, key, scale)
            sums = sums.over_data(partition.collectives)
            weight = sums.loss.weight
            inverse = jax.numpy.where(weight > 0, 1.0 / weight, 0.0)
            reduced = [
                partition.collectives.reduce(own, grad * inverse)
                for own, grad in zip(
                    leaf_shardings, jax.tree.leaves(grads), strict=True
                )
            ]
            stored = [
                self.stages.from_stages(own, view) if is_stacked(own.name) else view
                for own, view in zip(partition.leaves, reduced, strict=True)
            ]
            return stored, sums, model_state

        return gradients_on_shards(partition, structure, body)

    def make_forward(
        self, partition: Partition, loss: Loss, params_like: Params, *, training: bool
    ) -> Callable[..., Sums]:
        """Run only the schedule's forwards."""
        structure = jax.tree.structure(params_like)

        def forward(shards, inputs, model_state, key, parts):
            del model_state
            stages = self.stages
            schedule = make_in_groups(
                "forwards", stages.num_stages, parts, stages.num_chunks
            )
            chunks = self._chunks(partition, loss, parts, training=training)
            chunks = dataclasses.replace(chunks, keeps=False)
            params = jax.tree.unflatten(structure, self._whole(partition, shards))
            table = make_tick_table(schedule, training=False)
            key = partition.shard_key(key)
            return run_forwards(chunks, table, params, inputs, key)

        return forward

    def make_evaluation(
        self, partition: Partition, loss: Loss, params_like: Params
    ) -> Callable[..., Sums]:
        """Run only the schedule's forwards, in as many micro-batches as possible.

        Their number divides the rows. A loss that couples examples sees all rows.
        """

        def make_body(partition: Partition) -> Callable[..., Sums]:
            forward = self.make_forward(partition, loss, params_like, training=False)

            def body(shards, inputs, model_state, key):
                most = 1 if partition.coupled else self.schedule.num_microbatches
                parts = math.gcd(num_rows(inputs), most)
                return forward(shards, inputs, model_state, key, parts)

            return body

        return evaluation_on_shards(partition, make_body)

    def notes(
        self, zero: ZeroStage, leaf_shardings: Mapping[str, LeafSharding]
    ) -> tuple[str, ...]:
        """The schedule, idle places, and costs of embedding, head and stages."""
        own, cut = self.schedule, self.stages
        lines = [
            f"pipe: {own.name}: {own.num_microbatches} micro-batches on "
            f"{own.num_stages} stages take {own.num_ticks} ticks, "
            f"{self.bubble:.1%} of the time bubble (a backward "
            "counts as two forwards); a stage stores up to "
            f"{kept(own).inputs.max()} inputs.",
            "pipe: every tick sends an activation forwards and a cotangent back; every "
            "micro-batch all-reduces its last and its first hidden state over pipe, "
            "and two more over the axes that split its vocabulary.",
        ]
        if cut.idle_places:
            places = cut.num_virtual * cut.places
            lines.append(
                f"pipe: {cut.num_blocks} blocks on {cut.num_virtual} virtual stages "
                f"leave {cut.idle_places} of {places} places idle."
            )
        if own.splits_backward:
            lines.append(
                f"pipe: {self.block.deferred:.0%} of a backward computes only weight "
                "gradients, deferred to idle time; a stage stores the inputs of up to "
                f"{kept(own).products.max()} of them."
            )
        if not cut.in_order:
            lines.append(
                "pipe: blocks are moved to their stages, and back, once a step."
            )
        ends = [leaf for name, leaf in leaf_shardings.items() if not is_stacked(name)]
        if not any(
            PIPE in axes for leaf in ends for axes in map(axes_of, leaf.compute)
        ):
            lines.append(
                "pipe: no dim of embedding or head is named 'vocab', so every stage "
                "computes all of both."
            )
        if zero.number >= 2:
            lines.append(
                f"pipe: at ZeRO {zero.number} a stage gathers its parameters, and "
                "reduces its gradients, once a step, as at ZeRO 1, and holds both."
            )
        return tuple(lines)

    @property
    def bubble(self) -> float:
        """By the schedule; a backward counts as two forwards."""
        return cost_of(self.schedule, self.block.deferred).bubble

    @property
    def active_fraction(self) -> float:
        """Of a stage's forwards, and of its backwards; embedding and head have less."""
        own = self.schedule
        return own.num_microbatches * own.num_chunks / own.num_ticks

    @property
    def times(self) -> Mapping[str, float]:
        """By the block's cost; a full backward counts as two forwards."""
        return times_of(self.schedule, self.block.deferred)

    def flops(self, counted: int, model: int, shards: int) -> int:
        """Skips idle slots, which are traced, and adds recomputed blocks.

        What a policy between "none" and "full" saves is not subtracted.
        """
        del counted
        if self.network.remat == "none":
            return model
        times = self.network.num_blocks * self.schedule.num_microbatches * shards
        return model + times * self.block.flops

    def _chunks(
        self, partition: Partition, loss: Loss, accumulate: int, *, training: bool
    ) -> Chunks:
        functions = StageFunctions(
            self.network,
            loss,
            self.stages,
            accumulate,
            training=training,
            platform=partition.platform,
            draws=partition.draws,
        )
        keeps = self.network.remat == "none"
        return Chunks(functions, keeps=keeps, splits=self.schedule.splits_backward)

    def communicated_shardings(
        self, leaf_shardings: Sequence[LeafSharding]
    ) -> list[LeafSharding]:
        """The shardings in which leaves are gathered, and gradients reduced."""
        return [
            self.stages.staged(leaf) if is_stacked(leaf.name) else leaf
            for leaf in leaf_shardings
        ]

    def _whole(self, partition: Partition, shards: Sequence[Any]) -> list[jax.Array]:
        """Cast, reorder for the stages, gather: once a step."""
        whole = []
        staged = self.communicated_shardings(partition.leaves)
        for leaf, own, shard in zip(partition.leaves, staged, shards, strict=True):
            view = shard.astype(partition.precision.compute_dtype)
            if is_stacked(leaf.name):
                view = self.stages.to_stages(leaf, view)
            whole.append(partition.collectives.gather(own, view))
        return whole
