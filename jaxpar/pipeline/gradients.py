"""How does a schedule over stages compute gradients and evaluations?"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from jaxpar import tree
from jaxpar.mesh import PIPE
from jaxpar.model.network import PipelineNetwork
from jaxpar.pipeline.between_steps import NothingBetweenSteps
from jaxpar.pipeline.block_cost import (
    BlockWork,
    cost_of,
    times_of,
)
from jaxpar.pipeline.executor import run_forwards, run_schedule
from jaxpar.pipeline.part_state import staged_state, stored_state
from jaxpar.pipeline.schedules.interleaved import make_in_groups
from jaxpar.pipeline.schedules.table import Schedule, kept
from jaxpar.pipeline.sections import Sections
from jaxpar.pipeline.stage_functions import StageFunctions
from jaxpar.pipeline.stages import Division, Stages
from jaxpar.pipeline.tick_table import make_tick_table
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.rules import Spec, axes_of
from jaxpar.sharding.zero import ZeroStage, shard_leaves
from jaxpar.step.evaluation import evaluation_on_shards
from jaxpar.step.gradients import gradients_on_shards
from jaxpar.step.inputs import num_rows
from jaxpar.step.loss import Loss, Sums
from jaxpar.step.partition import Partition
from jaxpar.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class Pipeline(NothingBetweenSteps):
    """A schedule over stages.

    Attributes:
      network: embedding, blocks and head.
      schedule: the schedule.
      division: which blocks are on which stage.
      block: a block's cost, the mean of all.
    """

    network: PipelineNetwork
    schedule: Schedule
    division: Division
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
        stacks = {name: own for name in leaves if (own := self.division.of(name))}
        split = {
            n: (PIPE, *compute[n][1:]) for n, own in stacks.items() if own.in_order
        }
        moved = tuple(name for name in stacks if name not in split)
        given = leaves, {**compute, **split}, zero, sizes, allow_whole
        return shard_leaves(*given, moved)

    def make_gradients(
        self,
        partition: Partition,
        loss: Loss,
        like: tuple[Params, Params],
        accumulate: int,
    ) -> Callable[..., tuple[Params, Sums, PyTree, PyTree]]:
        """Compute gradients by the schedule.

        At every ZeRO stage parameters are gathered, and gradients reduced, once a step.
        """
        structure = jax.tree.structure(like)
        sections = self._sections(partition, loss, accumulate, training=True)
        table = make_tick_table(self.schedule, training=True, keeps=sections.keeps)
        leaf_shardings = self.communicated_shardings(partition.on_shard)

        def body(shards, inputs, model_state, key, scale, carry):
            key = partition.shard_key(key)
            whole = partition.local(
                leaf_shardings, self._whole(partition, shards), carry
            )
            params = self._params(structure, whole)
            variables = params, staged_state(self.division, model_state)
            given = sections, table, variables, inputs, key, scale
            grads, sums, state = run_schedule(*given)
            sums = sums.over_data(partition.collectives)
            weight = sums.loss.weight
            inverse = jax.numpy.where(weight > 0, 1.0 / weight, 0.0)
            grads = [grad * inverse for grad in jax.tree.leaves(grads)]
            given = leaf_shardings, grads, carry, scale
            reduced, carry = partition.reduced_once(*given)
            stored = self.in_stored_order(partition, reduced)
            return stored, sums, stored_state(self.division, state), carry

        return gradients_on_shards(partition, jax.tree.structure(like[0]), body)

    def in_stored_order(
        self, partition: Partition, reduced: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Reduced gradients, whose blocks are in the stages' order."""
        return [
            stages.from_stages(own, view)
            if (stages := self.division.of(own.name))
            else view
            for own, view in zip(partition.on_shard, reduced, strict=True)
        ]

    def make_forward(
        self,
        partition: Partition,
        loss: Loss,
        like: tuple[Params, Params],
        *,
        training: bool,
    ) -> Callable[..., Sums]:
        """Run only the schedule's forwards."""
        structure = jax.tree.structure(like)

        def forward(shards, inputs, model_state, key, parts):
            P, v = self.division.num_stages, self.division.num_chunks
            schedule = make_in_groups("forwards", P, parts, v)
            sections = self._sections(partition, loss, parts, training=training)
            sections = dataclasses.replace(sections, keeps=False)
            params = self._params(structure, self._whole(partition, shards))
            table = make_tick_table(schedule, training=False)
            variables = params, staged_state(self.division, model_state)
            key = partition.shard_key(key)
            return run_forwards(sections, table, variables, inputs, key)

        return forward

    def make_evaluation(
        self, partition: Partition, loss: Loss, like: tuple[Params, Params]
    ) -> Callable[..., Sums]:
        """Run only the schedule's forwards, in as many micro-batches as possible.

        Their number divides the rows. A loss that couples examples sees all rows.
        """

        def make_body(partition: Partition) -> Callable[..., Sums]:
            forward = self.make_forward(partition, loss, like, training=False)

            def body(shards, inputs, model_state, key):
                most = 1 if partition.coupled else self.schedule.num_microbatches
                parts = math.gcd(num_rows(inputs), most)
                return forward(shards, inputs, model_state, key, parts)

            return body

        return evaluation_on_shards(partition, make_body)

    def notes(
        self,
        zero: ZeroStage,
        leaf_shardings: Mapping[str, LeafSharding],
        frozen: Collection[str] = (),
    ) -> tuple[str, ...]:
        """The schedule, idle places, and costs of embedding, head and stages."""
        own = self.schedule
        trained = [name for name in leaf_shardings if name not in frozen]
        embeds = any(name.startswith("embed/") for name in trained)
        first = "and its first " if embeds or not frozen else ""
        lines = [
            *self._schedule_lines(),
            "pipe: every tick sends an activation forwards and a cotangent back; every "
            f"micro-batch all-reduces its last {first}hidden state over pipe, "
            "and two more over the axes that split its vocabulary.",
        ]
        lines += [
            self._idle_line(cut, leaf_shardings, frozen)
            for cut in self.division.sections
            if cut.idle_places
        ]
        if own.splits_backward:
            lines.append(
                f"pipe: {self.block.deferred:.0%} of a backward computes only weight "
                "gradients, deferred to idle time; a stage stores the inputs of up to "
                f"{kept(own).products.max()} of them."
            )
        if not all(cut.in_order for cut in self.division.sections):
            lines.append(
                "pipe: blocks are moved to their stages, and back, once a step."
            )
        leaves = leaf_shardings.items()
        ends = [leaf for name, leaf in leaves if not self.division.of(name)]
        if not any(
            PIPE in axes for leaf in ends for axes in map(axes_of, leaf.compute)
        ):
            lines.append(
                "pipe: no dim of embedding or head is named 'vocab', so every stage "
                "computes all of both."
            )
        if self.network.layer_drop is not None:
            lines.append(
                "pipe: a tick is as long as its slowest stage, so layer_drop saves a "
                "step less time than the blocks that it leaves out would take."
            )
        if zero.number >= 2:
            lines.append(
                f"pipe: at ZeRO {zero.number} a stage gathers its parameters, and "
                "reduces its gradients, once a step, as at ZeRO 1, and holds both."
            )
        return tuple(lines)

    @property
    def recomputes(self) -> bool:
        """Whether a backward runs its blocks again."""
        return self.network.remat != "none"

    def _schedule_lines(self) -> tuple[str, ...]:
        """The schedule's time, and what it stores."""
        own = self.schedule
        return (
            f"pipe: {own.name}: {own.num_microbatches} micro-batches on "
            f"{own.num_stages} stages take {own.num_ticks} ticks, "
            f"{self.bubble:.1%} of the time bubble (a backward "
            "counts as two forwards); a stage stores up to "
            f"{kept(own).inputs.max()} inputs.",
        )

    def _idle_line(
        self,
        cut: Stages,
        leaf_shardings: Mapping[str, LeafSharding],
        frozen: Collection[str],
    ) -> str:
        """What the idle places of a section cost."""
        leaves = leaf_shardings.values()
        own = [leaf for leaf in leaves if self.division.of(leaf.name) == cut]
        each = cut.idle_places / cut.num_stages / cut.num_blocks
        sizes = {leaf.name: each * math.prod(leaf.view_shape) for leaf in own}
        # Gradients in fp32 are added up for every place.
        idle = 4 * sum(n for name, n in sizes.items() if name not in frozen)
        places = cut.num_virtual * cut.places
        return (
            f"pipe: {cut.name}: {cut.num_blocks} blocks on {cut.num_virtual} virtual "
            f"stages leave {cut.idle_places} of {places} places idle; their gradients "
            f"take {idle:,.0f} bytes of a device, and their copies for the step "
            f"{sum(sizes.values()):,.0f} elements."
        )

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
        if not self.recomputes:
            return model
        times = self.network.num_blocks * self.schedule.num_microbatches * shards
        return model + times * self.block.flops

    def _sections(
        self, partition: Partition, loss: Loss, accumulate: int, *, training: bool
    ) -> Sections:
        functions = StageFunctions(
            self.network,
            loss,
            accumulate,
            training=training,
            platform=partition.platform,
            draws=partition.draws,
            trained=frozenset(leaf.name for leaf in partition.leaves),
        )
        keeps = not self.recomputes
        splits = self.schedule.splits_backward
        return Sections(functions, self.division, keeps=keeps, splits=splits)

    def communicated_shardings(
        self, leaf_shardings: Sequence[LeafSharding]
    ) -> list[LeafSharding]:
        """The shardings in which leaves are gathered, and gradients reduced."""
        return [
            own.staged(leaf) if (own := self.division.of(leaf.name)) else leaf
            for leaf in leaf_shardings
        ]

    def _whole(self, partition: Partition, shards: Sequence[Any]) -> list[jax.Array]:
        """Cast, reorder for the stages, gather: once a step."""
        whole, views = [], partition.inside_replica(shards)
        leaves = partition.all_on_shard
        staged = self.communicated_shardings(leaves)
        for leaf, own, view in zip(leaves, staged, views, strict=True):
            if stages := self.division.of(leaf.name):
                view = stages.to_stages(leaf, view)
            whole.append(partition.collectives.gather(own, view))
        return whole

    def _params(self, structure: Any, whole: list[jax.Array]) -> Params:
        """By part of the network."""
        params = tree.merged(*jax.tree.unflatten(structure, whole))
        # A tree parted in two has no part without parameters.
        return {part: params.get(part, {}) for part in self.network.parts}
