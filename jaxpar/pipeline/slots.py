"""What does every stage do in a tick: its forward, its backward, its sends.

Each method runs with the pipe axis manual, every stage on its own shard, and skips
idle stages.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.pipeline.buffers import (
    arrived,
    on_stages,
    over_pipe,
    put,
    take,
    take_before,
    unused_like,
)
from jaxpar.pipeline.chunks import ChunkWork
from jaxpar.pipeline.schedules.table import IDLE
from jaxpar.pipeline.sections import Sections
from jaxpar.pipeline.stages import Division
from jaxpar.pipeline.tick_table import TickRows, TickTable
from jaxpar.pipeline.versions import OneBatch
from jaxpar.step.inputs import Inputs
from jaxpar.step.row_draws import ShardKey
from jaxpar.types import Params, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Buffers:
    """The stages' buffers between ticks, [P, places, ...] each.

    Attributes:
      inputs: inputs of chunks.
      kept: residuals of forwards, for their backwards.
      cotangents: cotangents of chunks' outputs.
      products: inputs of deferred weight gradients.
      state: the mutable state of a stage's parts: of a section's blocks [P, v n, ...],
        of a part between two sections [P, ...], of which the first stage's counts.
      seen: what forwards saw of it, for their backwards; {} for none.
    """

    inputs: PyTree
    kept: PyTree
    cotangents: PyTree
    products: PyTree
    state: PyTree = dataclasses.field(default_factory=dict)
    seen: PyTree = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Slots:
    """The slots of one step's ticks.

    Attributes:
      sections: the forwards and backwards of chunks.
      blocks: versions of section -> its blocks' parameters, [P v n, ...].
      between: part between two sections -> its parameters.
      inputs: this data shard's rows.
      key: the step's key.
      state: the mutable state before the step, as in `Buffers`.
      versions: which parameters a slot uses, and where its gradients are added.
    """

    sections: Sections
    blocks: tuple[Params, ...]
    between: Params
    inputs: Inputs
    key: ShardKey
    state: PyTree = dataclasses.field(default_factory=dict)
    versions: OneBatch = dataclasses.field(default_factory=OneBatch)

    def empty_buffers(self, table: TickTable, *, training: bool) -> Buffers:
        """Make the buffers of a schedule.

        Args:
          table: the schedule.
          training: whether to include the buffers that only backwards use.

        Returns:
          The buffers; their initial values are never used.
        """
        num_stages, hidden = self._division.num_stages, self.sections.structs

        def buffer(places: int, shapes: PyTree) -> PyTree:
            wide = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((num_stages, places, *x.shape), x.dtype),
                shapes,
            )
            return jax.tree.map(over_pipe, unused_like(wide))

        waiting = buffer(table.num_inputs, hidden)
        if not training:
            return Buffers(waiting, [], [], [], self.state)
        kept, products, seen = self._shapes_between()
        return Buffers(
            inputs=waiting,
            kept=buffer(table.num_kept, kept),
            cotangents=buffer(table.num_cotangents, hidden),
            products=buffer(table.num_products, products),
            state=self.state,
            seen=buffer(table.num_kept, seen),
        )

    def forwards(
        self, buffers: Buffers, entered: PyTree, row: TickRows
    ) -> tuple[PyTree, Buffers]:
        """Run each stage's forward.

        Args:
          buffers: the buffers.
          entered: the hidden state of the micro-batch that enters.
          row: the tick.

        Returns:
          The output of each stage's chunk, [P, ...]; and the buffers, with the new
          state.
        """

        def forward(own: tuple, blocks: tuple, shared: tuple) -> tuple:
            stage, buffers, row = own
            entered, between, inputs, key = shared
            index, chunk, place = row.forward, row.forward_chunk, row.forward_place
            enters = (stage == 0) & (chunk == 0) & (index != IDLE)
            (there,), entered = take_before(buffers.inputs, [place], entered)
            hidden = optax.tree.where(enters, entered, there)
            put_in = put(buffers.inputs, entered, jnp.where(enters, place, IDLE))
            seen = self.sections.chunk_of(buffers.state, chunk)
            work = self._work(stage, chunk, inputs, index, key, seen)

            def run() -> tuple[PyTree, PyTree, PyTree]:
                params = self.versions.forward(blocks, index)
                params = self.sections.chunk_of({**params, **between}, chunk)
                return self.sections.forward(params, hidden, work)

            out, kept, state = _if_busy(index, run)
            state = optax.tree.where(index != IDLE, state, seen)
            kept_at = row.forward_kept
            buffers = dataclasses.replace(
                buffers,
                inputs=put_in,
                kept=put(buffers.kept, kept, kept_at),
                state=self.sections.put_chunk(buffers.state, state, chunk),
                seen=put(buffers.seen, seen, kept_at) if buffers.seen else {},
            )
            return (out, buffers), None

        shared = (entered, self.between, self.inputs, self.key)
        own = (self._numbers, buffers, _of_stages(row))
        return on_stages(forward)(own, self.blocks, shared)[0]

    def backwards(
        self,
        buffers: Buffers,
        grads: tuple[Params, Params],
        cotangent: PyTree,
        weights: jax.Array,
        row: TickRows,
    ) -> tuple[Buffers, tuple[Params, Params], PyTree]:
        """Run each stage's backward, and its deferred weight gradients.

        Args:
          buffers: the buffers.
          grads: gradients so far, fp32: of sections, [P v n, ...], and of the parts
            between them, [P, ...].
          cotangent: of the hidden state that left in this tick.
          weights: [M]: the weight of each micro-batch's loss.
          row: the tick.

        Returns:
          The buffers, the gradients, and the cotangents of chunks' inputs, [P, ...].
        """

        def backward(own: tuple, stacks: tuple, shared: tuple) -> tuple:
            stage, buffers, row, grads_between = own
            blocks, grads = stacks
            cotangent, head_place, weights, between, inputs, key = shared
            leaves = jnp.where(stage == self._division.num_stages - 1, head_place, IDLE)
            cotangents = put(buffers.cotangents, cotangent, leaves)
            index, chunk = row.backward, row.backward_chunk
            params = self.versions.backward(blocks, index)
            params = self.sections.chunk_of({**params, **between}, chunk)
            grads = {**grads, **grads_between}
            seen = take(buffers.seen, row.backward_kept)
            work = self._work(stage, chunk, inputs, index, key, seen)

            # Read here: XLA copies a buffer that a branch reads before it is written.
            given = (
                take(buffers.inputs, row.backward_place),
                take(buffers.kept, row.backward_kept),
                take(cotangents, row.cotangent_place),
            )
            made, sent_back, products = _if_busy(
                index, lambda: self.sections.backward(params, *given, work)
            )
            made = _weighed(made, weights, index)
            add = self.versions.added_chunk
            grads = add(self.sections, grads, made, chunk, index)
            waiting, products = take_before(
                buffers.products, list(row.weight_place), products
            )
            for slot, there in enumerate(waiting):
                is_new = row.weight_place[slot] == row.products_place
                own = optax.tree.where(is_new, products, there)
                index, chunk = row.weight[slot], row.weight_chunk[slot]
                late_work = self._work(stage, chunk, inputs, index, key, seen)
                late = self._late(own, sent_back, index, params, late_work)
                late = _weighed(late, weights, index)
                grads = add(self.sections, grads, late, chunk, index)
            products = put(buffers.products, products, row.products_place)
            buffers = dataclasses.replace(
                buffers, cotangents=cotangents, products=products
            )
            grads_between = {name: grads.pop(name) for name in grads_between}
            return (buffers, sent_back, grads_between), grads

        own = (self._numbers, buffers, _of_stages(row), grads[1])
        rest = self.between, self.inputs, self.key
        shared = (cotangent, row.head_place, weights, *rest)
        stacks = (self.blocks, grads[0])
        (buffers, sent_back, between), blocks = on_stages(backward)(own, stacks, shared)
        return buffers, (blocks, between), sent_back

    def send(
        self, buffers: Buffers, out: PyTree, sent_back: PyTree | None, row: TickRows
    ) -> Buffers:
        """Send activations forwards and cotangents back, and buffer received ones.

        Args:
          buffers: the buffers.
          out: the chunks' outputs, [P, ...].
          sent_back: the cotangents of their inputs, [P, ...]; None in an evaluation.
          row: the tick.

        Returns:
          The buffers.
        """

        def send(own: tuple, *_: None) -> tuple:
            buffers, out, sent_back, row = own
            on = self._pairs
            inputs = arrived(on, buffers.inputs, out, row.input_arrives)
            buffers = dataclasses.replace(buffers, inputs=inputs)
            if sent_back is not None:
                back = [(there, here) for here, there in on]
                cotangents = arrived(
                    back, buffers.cotangents, sent_back, row.cotangent_arrives
                )
                buffers = dataclasses.replace(buffers, cotangents=cotangents)
            return buffers, None

        return on_stages(send)((buffers, out, sent_back, _of_stages(row)), None, None)[
            0
        ]

    @property
    def _division(self) -> Division:
        return self.sections.division

    @property
    def _numbers(self) -> jax.Array:
        return jnp.arange(self._division.num_stages)

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        """(from, to) of activations; with one chunk the last stage sends none."""
        num_stages = self._division.num_stages
        last = num_stages - (self._division.num_chunks == 1)
        return [(here, (here + 1) % num_stages) for here in range(last)]

    def _work(
        self,
        stage: jax.Array,
        chunk: jax.Array,
        inputs: Inputs,
        index: jax.Array,
        key: ShardKey,
        state: PyTree,
    ) -> ChunkWork:
        virtual = jnp.maximum(chunk, 0) * self._division.num_stages + stage
        return ChunkWork(virtual, inputs, index, key, state)

    def _late(
        self,
        products: PyTree,
        hidden: PyTree,
        index: jax.Array,
        params: Params,
        work: ChunkWork,
    ) -> Params:
        """The weight gradients of one slot.

        Of `hidden`, and of the state in `work`, only the shapes are used.
        """
        return _if_busy(
            index, lambda: self.sections.weights(params, hidden, products, work)
        )

    def _shapes_between(self) -> tuple[PyTree, PyTree, PyTree]:
        """Shapes of what forwards leave for backwards, and these for weight gradients.

        Returns:
          A forward's residuals, deferred weight gradients' inputs, a forward's state.
        """

        def run(own: tuple, blocks: tuple, shared: tuple) -> tuple:
            stage, state = own
            hidden, between, inputs, key = shared
            first = jnp.int32(0)
            seen = self.sections.chunk_of(state, first)
            work = self._work(stage, first, inputs, first, key, seen)
            params = self.sections.chunk_of({**blocks[0], **between}, first)
            out, kept, _ = self.sections.forward(params, hidden, work)
            _, _, products = self.sections.backward(params, hidden, kept, out, work)
            return (kept, products, seen), None

        own = self._numbers, self.state
        shared = (self.sections.structs, self.between, self.inputs, self.key)
        own, _ = jax.eval_shape(on_stages(run), own, self.blocks, shared)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), own)


def _of_stages(row: TickRows) -> TickRows:
    """A row without the entries that are the same for all stages."""
    none = {"embed": None, "head": None, "head_place": None, "embed_backward": None}
    return dataclasses.replace(row, **none)


def _if_busy(index: jax.Array, run: Callable[[], Any]) -> Any:
    """Run a slot unless it is idle; the result of an idle one must not be used."""
    return jax.lax.cond(index != IDLE, run, lambda: unused_like(jax.eval_shape(run)))


def _weighed(grads: Params, weights: jax.Array, index: jax.Array) -> Params:
    """Gradients times their micro-batch's weight, fp32; zeros for an idle slot."""
    weight = weights[jnp.maximum(index, 0)]
    return jax.tree.map(
        lambda x: jnp.where(index != IDLE, x.astype(jnp.float32) * weight, 0.0), grads
    )
