"""How is any schedule run: one scan over the ticks of its table.

In each tick: the embedding of the micro-batch that enters, a forward on every stage
that has one, the loss of the micro-batch that leaves, a backward on every stage that
has one, the gradient of the embedding; then activations are sent to the next stage and
cotangents to the previous one. Forwards and backwards run with the pipe axis manual
(`jaxpar.pipeline.slots`). Embedding, head and loss run in automatic mode, so all stages
share the work of a vocabulary that is sharded over pipe.

Every forward changes the mutable state of the parts that have one, in the order of the
micro-batches. A backward that runs a part again uses the state that the forward saw.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import tree
from jaxpar.model.model_state import Variables, with_leaves
from jaxpar.pipeline.buffers import from_stage, over_pipe, put, take, unused_like
from jaxpar.pipeline.part_state import of_all_stages, on_each_stage
from jaxpar.pipeline.schedules.table import IDLE
from jaxpar.pipeline.sections import Sections
from jaxpar.pipeline.slots import Buffers, Slots
from jaxpar.pipeline.stage_functions import HeadParams, StageFunctions
from jaxpar.pipeline.tick_table import TickRows, TickTable
from jaxpar.pipeline.versions import OneBatch
from jaxpar.step.inputs import Inputs
from jaxpar.step.loss import Sums
from jaxpar.step.row_draws import ShardKey
from jaxpar.step.weighted import merged, of_no_examples
from jaxpar.types import Leaf, Params, PyTree


def run_schedule(
    sections: Sections,
    table: TickTable,
    variables: Variables,
    inputs: Inputs,
    key: ShardKey,
    scale: jax.Array,
) -> tuple[Params, Sums, PyTree]:
    """Run a schedule with backwards.

    Args:
      sections: the forwards and backwards of chunks.
      table: the schedule.
      variables: the parameters, gathered over data, in the compute dtype, and the
        mutable state; blocks in the stages' order.
      inputs: this data shard's rows.
      key: the step's key.
      scale: the loss scale.

    Returns:
      The sums over micro-batches of scale times the gradients of the losses' totals,
      fp32, of the parameters that are trained; the losses' and metrics' sums; and the
      state after the last micro-batch.
    """
    sections = sections.of_step(variables, inputs, key)
    executor = Executor(sections, *variables, inputs, key, scale)
    carry = executor.initial(table)
    carry, _ = jax.lax.scan(executor.tick, carry, _as_arrays(table.rows))
    assert carry.blocks is not None, "made for training"
    blocks, between = carry.blocks
    # Such a part runs on the first stage alone.
    between = executor.first_of(between) if jax.tree.leaves(between) else between
    grads = {"embed": carry.embed, "head": carry.head, **blocks, **between}
    return grads, carry.sums, executor.state_after(carry)


def run_forwards(
    sections: Sections,
    table: TickTable,
    variables: Variables,
    inputs: Inputs,
    key: ShardKey,
) -> Sums:
    """Run a schedule's forwards, each with the same mutable state.

    Returns:
      The losses' and metrics' sums over micro-batches.
    """
    sections = sections.of_step(variables, inputs, key)
    executor = Executor(sections, *variables, inputs, key, jnp.float32(1))
    carry = executor.initial(table, training=False)
    carry, _ = jax.lax.scan(executor.forward_tick, carry, _as_arrays(table.rows))
    return carry.sums


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """The scan's carry; of several batches where `OneBatch` says so.

    Attributes:
      buffers: the stages' buffers.
      weights: [M]: the weight of each micro-batch's loss.
      sums: sums of losses and metrics.
      embed: gradients of the embedding, fp32.
      blocks: gradients, fp32, of the sections, [P v n, ...], and of the parts between
        them, [P, ...].
      head: gradients of the head, fp32.
      ends: the mutable state of embedding and head.
      seen: [M, ...]: what each embedding saw of its state; None for no backward.
    """

    buffers: Buffers
    weights: Leaf
    sums: Sums
    embed: Params | None
    blocks: tuple[Params, Params] | None
    head: Params | None
    ends: PyTree
    seen: PyTree


@dataclasses.dataclass(frozen=True)
class Executor:
    """One step's arguments, and its ticks.

    Attributes:
      versions: which parameters a piece of work uses, and where its results are added.
      others: versions of the parameters besides `params`.
    """

    sections: Sections
    params: Params
    state: PyTree
    inputs: Inputs
    key: ShardKey
    scale: jax.Array
    versions: OneBatch = dataclasses.field(default_factory=OneBatch)
    others: tuple[Params, ...] = ()

    @property
    def functions(self) -> StageFunctions:
        """Embedding and head as functions."""
        return self.sections.functions

    @functools.cached_property
    def slots(self) -> Slots:
        """The stages' forwards, backwards and sends."""
        stacked, joints = self.sections.names
        blocks = tuple(
            {name: params[name] for name in stacked}
            for params in (self.params, *self.others)
        )
        between = {name: self.params[name] for name in joints}
        given = self.sections, blocks, between, self.inputs, self.key
        num_stages = self.sections.division.num_stages
        state = on_each_stage(self.state, self.sections.names, num_stages)
        return Slots(*given, state, self.versions)

    def head_params(self, index: jax.Array) -> HeadParams:
        """A micro-batch's: the head's own, and those tied to the embedding."""
        tied = self.functions.network.tied
        every = (self.params, *self.others)
        heads = tuple((own["head"], tied(own["embed"])) for own in every)
        return self.versions.forward(heads, index)

    @property
    def _embeds(self) -> tuple[Params, ...]:
        return tuple(own["embed"] for own in (self.params, *self.others))

    def initial(self, table: TickTable, *, training: bool = True) -> Carry:
        """Empty buffers and zero sums."""
        first, slots = jnp.int32(0), self.slots
        hidden = self.sections.last(self.sections.structs)
        ends = {part: self.state.get(part, {}) for part in ("embed", "head")}
        head = self.head_params(first), ends["head"]
        given = head, hidden, self.inputs, first, self.key
        sums, _ = jax.eval_shape(self.functions.head, *given)
        zeros: dict[str, Any] = {"embed": None, "blocks": None, "head": None}
        if training:
            each = (self.sections.division.num_stages,)
            trained = self.sections.trained
            apart = {part: self.params[part] for part in ("embed", "head")}
            zeros = self.versions.zeros(trained(apart))
            zeros["blocks"] = (
                self.versions.zeros(trained(slots.blocks[0]), axis=1),
                jax.tree.map(
                    lambda x: over_pipe(jnp.zeros(each + x.shape)),
                    trained(slots.between),
                ),
            )
        return Carry(
            buffers=slots.empty_buffers(table, training=training),
            weights=jnp.zeros(self.versions.num_weights(self.functions.accumulate)),
            sums=self.versions.no_losses(of_no_examples(sums)),
            ends=ends,
            seen=self._of_microbatches(ends["embed"]) if training else None,
            **zeros,
        )

    def tick(self, carry: Carry, row: TickRows) -> tuple[Carry, None]:
        """A tick of a training step."""
        grads = carry.blocks
        assert grads is not None, "made for training"
        entered, state = self._embedded(carry, row)
        seen = put(carry.seen, carry.ends["embed"], row.embed)
        ends = carry.ends | {"embed": state}
        carry = dataclasses.replace(carry, ends=ends, seen=seen)
        out, buffers = self.slots.forwards(carry.buffers, entered, row)
        carry, cotangent = self._losses(carry, out, row)
        buffers, blocks, sent_back = self.slots.backwards(
            buffers, grads, cotangent, carry.weights, row
        )
        embed = self._embed_backward(carry, sent_back, row)
        buffers = self.slots.send(buffers, out, sent_back, row)
        return dataclasses.replace(
            carry, buffers=buffers, embed=embed, blocks=blocks
        ), None

    def forward_tick(self, carry: Carry, row: TickRows) -> tuple[Carry, None]:
        """A tick of an evaluation, which leaves the mutable state as it is."""
        entered, _ = self._embedded(carry, row)
        out, buffers = self.slots.forwards(carry.buffers, entered, row)
        buffers = dataclasses.replace(buffers, state=carry.buffers.state)

        def loss() -> Sums:
            head = self.head_params(row.head), carry.ends["head"]
            given = head, self._last(out), self.inputs, row.head, self.key
            return self.functions.head(*given)[0]

        nothing = of_no_examples(carry.sums)
        sums = jax.lax.cond(row.head != IDLE, loss, lambda: nothing)
        sums = merged(carry.sums, sums)

        buffers = self.slots.send(buffers, out, None, row)
        return dataclasses.replace(carry, buffers=buffers, sums=sums), None

    def _embedded(self, carry: Carry, row: TickRows) -> tuple[PyTree, PyTree]:
        """The hidden state of the micro-batch that enters; the embedding's state."""
        before = carry.ends["embed"]

        def embed() -> tuple[PyTree, PyTree]:
            params = self.versions.forward(self._embeds, row.embed)
            given = (params, before), self.inputs, row.embed, self.key
            hidden, state = self.functions.embed(*given)
            # A branch that ends in a sharding constraint, as that of sequence
            # parallelism does, aborts XLA 0.11.2 ("inconsistent conditional sharding").
            return self.sections.of_first(jax.lax.optimization_barrier(hidden)), state

        def nothing() -> tuple[PyTree, PyTree]:
            return unused_like(jax.eval_shape(embed)[0]), before

        return jax.lax.cond(row.embed != IDLE, embed, nothing)

    def _losses(self, carry: Carry, out: PyTree, row: TickRows) -> tuple[Carry, PyTree]:
        """Add the loss of the micro-batch that leaves; also its hidden's cotangent."""
        params, frozen = self.functions.parted_head(self.head_params(row.head))
        before = carry.ends["head"]

        def loss() -> tuple:
            hidden = self._last(out)

            def total(params: HeadParams, hidden: PyTree) -> tuple[jax.Array, tuple]:
                variables = tuple(map(tree.merged, params, frozen)), before
                sums, state = self.functions.head(
                    variables, hidden, self.inputs, row.head, self.key
                )
                return sums.loss.total, (sums, state)

            _, pull, (sums, state) = jax.vjp(total, params, hidden, has_aux=True)
            weight = sums.loss.weight
            grads, cotangent = pull(jnp.where(weight > 0, self.scale / weight, 0.0))
            grads = jax.tree.map(lambda x: x.astype(jnp.float32) * weight, grads)
            return sums, grads, self.sections.of_last(cotangent), state

        def nothing() -> tuple:
            sums, grads, cotangent, _ = jax.eval_shape(loss)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), grads)
            return of_no_examples(sums), zeros, unused_like(cotangent), before

        found = jax.lax.cond(row.head != IDLE, loss, nothing)
        sums, (own, tied), cotangent, state = found
        embed = carry.embed
        for path, grad in tied.items():
            names = self.functions.network.tied_paths[path].split("/")
            embed = self._added_at(embed, names, grad, row.head)
        index = jnp.where(row.head == IDLE, len(carry.weights), row.head)
        after = dataclasses.replace(
            carry,
            sums=self.versions.merged(carry.sums, sums, row.head),
            weights=carry.weights.at[index].set(sums.loss.weight, mode="drop"),
            embed=embed,
            head=self.versions.added(carry.head, own, row.head),
            ends=carry.ends | {"head": state},
        )
        return after, cotangent

    def _embed_backward(self, carry: Carry, sent_back: PyTree, row: TickRows) -> Params:
        """Add the embedding's gradient for the first stage's cotangent."""
        index = row.embed_backward
        own = self.versions.backward(self._embeds, index)
        trained, frozen = self.functions.parted("embed", own)
        if not jax.tree.leaves(trained):
            return carry.embed

        def run() -> Params:
            cotangent = self.first_of(self.sections.first(sent_back))
            seen = take(carry.seen, index)

            def embed(params: Params) -> PyTree:
                variables = tree.merged(params, frozen), seen
                given = self.inputs, index, self.key
                return self.functions.embed(variables, *given)[0]

            _, pull = jax.vjp(embed, trained)
            (grads,) = pull(cotangent)
            weight = carry.weights[index]
            return jax.tree.map(lambda x: x.astype(jnp.float32) * weight, grads)

        zeros = jax.tree.map(_fp32_zeros, trained)
        grads = jax.lax.cond(index != IDLE, run, lambda: zeros)
        return self.versions.added(carry.embed, grads, index)

    def state_after(self, carry: Carry) -> PyTree:
        """The mutable state as `run_schedule` was given it, after the last tick."""
        num_stages = self.sections.division.num_stages
        given = carry.buffers.state, self.sections.names, num_stages
        return with_leaves(carry.ends | of_all_stages(*given, self.first_of))

    def _added_at(
        self, sums: PyTree, path: Sequence[str], grad: jax.Array, index: jax.Array
    ) -> PyTree:
        """Add to one leaf of a nested dict."""
        if not path:
            return self.versions.added(sums, grad, index)
        own = self._added_at(sums[path[0]], path[1:], grad, index)
        return {**sums, path[0]: own}

    def _of_microbatches(self, state: PyTree) -> PyTree:
        """A place for each micro-batch."""
        return jax.tree.map(
            lambda x: jnp.zeros((self.functions.accumulate, *x.shape), x.dtype), state
        )

    def first_of(self, values: PyTree) -> PyTree:
        """The first stage's of [P, ...]."""
        return from_stage(values, 0, platform=self.functions.platform)

    def _last(self, out: PyTree) -> PyTree:
        """The last stage's output, the head's input."""
        last = self.sections.division.num_stages - 1
        values = self.sections.last(out)
        return from_stage(values, last, platform=self.functions.platform)


def _as_arrays(rows: TickRows) -> TickRows:
    return jax.tree.map(jnp.asarray, rows)


def _fp32_zeros(x: jax.Array) -> jax.Array:
    return jnp.zeros_like(x, dtype=jnp.float32)
