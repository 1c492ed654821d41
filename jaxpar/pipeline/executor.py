"""How is any schedule run: one scan over the ticks of its table.

In each tick: the embedding of the micro-batch that enters, a forward on every stage
that has one, the loss of the micro-batch that leaves, a backward on every stage that
has one, the gradient of the embedding; then activations are sent to the next stage and
cotangents to the previous one. Forwards and backwards run with the pipe axis manual
(`jaxpar.pipeline.slots`). Embedding, head and loss run in automatic mode, so all stages
share the work of a vocabulary that is sharded over pipe.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.pipeline.buffers import from_stage, over_pipe, unused_like
from jaxpar.pipeline.schedules.table import IDLE
from jaxpar.pipeline.sections import Sections
from jaxpar.pipeline.slots import Buffers, Slots
from jaxpar.pipeline.stage_functions import StageFunctions
from jaxpar.pipeline.tick_table import TickRows, TickTable
from jaxpar.step.inputs import Inputs
from jaxpar.step.loss import Sums
from jaxpar.step.row_draws import ShardKey
from jaxpar.step.weighted import merged, of_no_examples
from jaxpar.types import Params, PyTree


def run_schedule(
    sections: Sections,
    table: TickTable,
    params: Params,
    inputs: Inputs,
    key: ShardKey,
    scale: jax.Array,
) -> tuple[Params, Sums]:
    """Run a schedule with backwards.

    Args:
      sections: the forwards and backwards of chunks.
      table: the schedule.
      params: gathered over data, in the compute dtype; blocks in the stages' order.
      inputs: this data shard's rows.
      key: the step's key.
      scale: the loss scale.

    Returns:
      The sums over micro-batches of scale times the gradients of the losses' totals,
      fp32, in the structure of `params`; and the losses' and metrics' sums.
    """
    sections = sections.of_step(params, inputs, key)
    executor = _Executor(sections, params, inputs, key, scale)
    carry = executor.initial(table)
    carry, _ = jax.lax.scan(executor.tick, carry, _as_arrays(table.rows))
    assert carry.blocks is not None, "made for training"
    blocks, between = carry.blocks
    # Such a part runs on the first stage alone.
    between = executor.first_of(between) if between else {}
    return {"embed": carry.embed, "head": carry.head, **blocks, **between}, carry.sums


def run_forwards(
    sections: Sections,
    table: TickTable,
    params: Params,
    inputs: Inputs,
    key: ShardKey,
) -> Sums:
    """Run a schedule's forwards; the losses' and metrics' sums over micro-batches."""
    sections = sections.of_step(params, inputs, key)
    executor = _Executor(sections, params, inputs, key, jnp.float32(1))
    carry = executor.initial(table, training=False)
    carry, _ = jax.lax.scan(executor.forward_tick, carry, _as_arrays(table.rows))
    return carry.sums


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Carry:
    """The scan's carry.

    Attributes:
      buffers: the stages' buffers.
      weights: [M]: the weight of each micro-batch's loss.
      sums: sums of losses and metrics.
      embed: gradients of the embedding, fp32.
      blocks: gradients, fp32, of the sections, [P v n, ...], and of the parts between
        them, [P, ...].
      head: gradients of the head, fp32.
    """

    buffers: Buffers
    weights: jax.Array
    sums: Sums
    embed: Params | None
    blocks: tuple[Params, Params] | None
    head: Params | None


@dataclasses.dataclass(frozen=True)
class _Executor:
    """One step's arguments, and its ticks."""

    sections: Sections
    params: Params
    inputs: Inputs
    key: ShardKey
    scale: jax.Array

    @property
    def functions(self) -> StageFunctions:
        """Embedding and head as functions."""
        return self.sections.functions

    @property
    def slots(self) -> Slots:
        """The stages' forwards, backwards and sends."""
        blocks, between = (
            {name: self.params[name] for name in names} for names in self.sections.names
        )
        return Slots(self.sections, blocks, between, self.inputs, self.key)

    @property
    def head_params(self) -> tuple[Params, dict[str, jax.Array]]:
        """The head's own parameters, and those tied to the embedding."""
        return self.params["head"], self.functions.network.tied(self.params["embed"])

    def initial(self, table: TickTable, *, training: bool = True) -> _Carry:
        """Empty buffers and zero sums."""
        first, slots = jnp.int32(0), self.slots
        hidden = self.sections.last(self.sections.structs)
        sums = jax.eval_shape(
            self.functions.head, self.head_params, hidden, self.inputs, first, self.key
        )
        zeros: dict[str, Any] = {"embed": None, "blocks": None, "head": None}
        if training:
            each = (self.sections.division.num_stages,)
            zeros = {
                "embed": jax.tree.map(_fp32_zeros, self.params["embed"]),
                "blocks": (
                    jax.tree.map(_fp32_zeros, slots.blocks),
                    jax.tree.map(
                        lambda x: over_pipe(jnp.zeros(each + x.shape)), slots.between
                    ),
                ),
                "head": jax.tree.map(_fp32_zeros, self.params["head"]),
            }
        return _Carry(
            buffers=slots.empty_buffers(table, training=training),
            weights=jnp.zeros(self.functions.accumulate, jnp.float32),
            sums=of_no_examples(sums),
            **zeros,
        )

    def tick(self, carry: _Carry, row: TickRows) -> tuple[_Carry, None]:
        """A tick of a training step."""
        grads = carry.blocks
        assert grads is not None, "made for training"
        out, buffers = self.slots.forwards(carry.buffers, self._embedded(row), row)
        carry, cotangent = self._losses(carry, out, row)
        buffers, blocks, sent_back = self.slots.backwards(
            buffers, grads, cotangent, carry.weights, row
        )
        embed = self._embed_backward(carry, sent_back, row)
        buffers = self.slots.send(buffers, out, sent_back, row)
        return dataclasses.replace(
            carry, buffers=buffers, embed=embed, blocks=blocks
        ), None

    def forward_tick(self, carry: _Carry, row: TickRows) -> tuple[_Carry, None]:
        """A tick of an evaluation."""
        out, buffers = self.slots.forwards(carry.buffers, self._embedded(row), row)

        def loss() -> Sums:
            hidden = self._last(out)
            head = self.functions.head
            return head(self.head_params, hidden, self.inputs, row.head, self.key)

        nothing = of_no_examples(carry.sums)
        sums = jax.lax.cond(row.head != IDLE, loss, lambda: nothing)
        sums = merged(carry.sums, sums)

        buffers = self.slots.send(buffers, out, None, row)
        return dataclasses.replace(carry, buffers=buffers, sums=sums), None

    def _embedded(self, row: TickRows) -> PyTree:
        """The hidden state of the micro-batch that enters."""

        def embed() -> PyTree:
            params = self.params["embed"]
            hidden = self.functions.embed(params, self.inputs, row.embed, self.key)
            # A branch that ends in a sharding constraint, as that of sequence
            # parallelism does, aborts XLA 0.11.2 ("inconsistent conditional sharding").
            return self.sections.of_first(jax.lax.optimization_barrier(hidden))

        return jax.lax.cond(
            row.embed != IDLE, embed, lambda: unused_like(jax.eval_shape(embed))
        )

    def _losses(
        self, carry: _Carry, out: PyTree, row: TickRows
    ) -> tuple[_Carry, PyTree]:
        """Add the loss of the micro-batch that leaves; also its hidden's cotangent."""
        params = self.head_params

        def loss() -> tuple:
            hidden = self._last(out)

            def total(params: Any, hidden: PyTree) -> tuple[jax.Array, Sums]:
                sums = self.functions.head(
                    params, hidden, self.inputs, row.head, self.key
                )
                return sums.loss.total, sums

            _, pull, sums = jax.vjp(total, params, hidden, has_aux=True)
            weight = sums.loss.weight
            grads, cotangent = pull(jnp.where(weight > 0, self.scale / weight, 0.0))
            grads = jax.tree.map(lambda x: x.astype(jnp.float32) * weight, grads)
            return sums, grads, self.sections.of_last(cotangent)

        def nothing() -> tuple:
            sums, grads, cotangent = jax.eval_shape(loss)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), grads)
            return of_no_examples(sums), zeros, unused_like(cotangent)

        sums, (own, tied), cotangent = jax.lax.cond(row.head != IDLE, loss, nothing)
        embed = carry.embed
        for path, grad in tied.items():
            names = self.functions.network.tied_paths[path].split("/")
            embed = _add_at(embed, names, grad)
        index = jnp.where(row.head == IDLE, self.functions.accumulate, row.head)
        after = dataclasses.replace(
            carry,
            sums=merged(carry.sums, sums),
            weights=carry.weights.at[index].set(sums.loss.weight, mode="drop"),
            embed=embed,
            head=jax.tree.map(jnp.add, carry.head, own),
        )
        return after, cotangent

    def _embed_backward(
        self, carry: _Carry, sent_back: PyTree, row: TickRows
    ) -> Params:
        """Add the embedding's gradient for the first stage's cotangent."""

        def run() -> Params:
            cotangent = self.first_of(self.sections.first(sent_back))

            def embed(params: Params) -> PyTree:
                return self.functions.embed(
                    params, self.inputs, row.embed_backward, self.key
                )

            _, pull = jax.vjp(embed, self.params["embed"])
            (grads,) = pull(cotangent)
            weight = carry.weights[row.embed_backward]
            return jax.tree.map(lambda x: x.astype(jnp.float32) * weight, grads)

        zeros = jax.tree.map(jnp.zeros_like, carry.embed)
        grads = jax.lax.cond(row.embed_backward != IDLE, run, lambda: zeros)
        return jax.tree.map(jnp.add, carry.embed, grads)

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


def _add_at(params: Params, path: Sequence[str], grad: jax.Array) -> Params:
    """Add to one leaf of a nested dict."""
    if not path:
        return params + grad
    return {**params, path[0]: _add_at(params[path[0]], path[1:], grad)}
