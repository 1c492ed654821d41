"""What does a stage do with a micro-batch: embed it, run blocks, compute its loss.

Pure functions of a micro-batch's index; the caller decides where they run.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar import tree
from jaxpar.model.model_state import Variables
from jaxpar.model.network import PipelineNetwork
from jaxpar.model.proxies import Call, ModelProxy, inputs_of
from jaxpar.model.section import SectionNetwork
from jaxpar.pipeline.stages import Stages
from jaxpar.step.inputs import Inputs, num_rows, twice_the_rows
from jaxpar.step.loss import Loss, Sums, loss_sums
from jaxpar.step.row_draws import BatchRows, Draws, ShardKey
from jaxpar.types import Params, PyTree

HeadParams = tuple[Params, dict[str, jax.Array]]
"""The head's own parameters, and path -> array of those tied to the embedding."""


@dataclasses.dataclass(frozen=True)
class StageFunctions:
    """Embedding and head as pure functions.

    Each takes a part's parameters and mutable state, and also returns the new state.

    Attributes:
      network: embedding, blocks and head.
      loss: the loss function.
      accumulate: micro-batches.
      training: False to evaluate.
      platform: the mesh's platform.
      draws: how random numbers are drawn.
      trained: names of the parameters that are trained.
    """

    network: PipelineNetwork
    loss: Loss
    accumulate: int
    training: bool
    platform: str
    draws: Draws
    trained: frozenset[str]

    def parted(self, part: str, params: Params) -> tuple[Params, Params]:
        """A part's parameters that are trained, and the others."""
        trained, frozen = tree.parted({part: params}, self.trained)
        return trained.get(part, {}), frozen.get(part, {})

    def parted_head(self, params: HeadParams) -> tuple[HeadParams, HeadParams]:
        """The head's parameters that are trained, and the others."""
        (own, frozen), tied = self.parted("head", params[0]), params[1]
        paths = {
            path
            for path, shared in self.network.tied_paths.items()
            if f"embed/{shared}" in self.trained
        }
        trained = {path: tied[path] for path in tied if path in paths}
        others = {path: tied[path] for path in tied if path not in paths}
        return (own, trained), (frozen, others)

    def rows(self, inputs: Inputs, index: jax.Array) -> Inputs:
        """Select a micro-batch."""
        return inputs.microbatch(index, self.accumulate)

    def embed(
        self, variables: Variables, inputs: Inputs, index: jax.Array, key: ShardKey
    ) -> tuple[PyTree, PyTree]:
        """Embed a micro-batch."""
        rows = self.rows(inputs, index)

        def twice() -> tuple:
            return variables, twice_the_rows(rows)

        args, own = (variables, rows), BatchRows(num_rows(rows), twice)
        return self.draws.call(self._embed, key.fold_in(index), args, own)

    def head(
        self,
        variables: tuple[HeadParams, PyTree],
        hidden: PyTree,
        inputs: Inputs,
        index: jax.Array,
        key: ShardKey,
    ) -> tuple[Sums, PyTree]:
        """The loss of a micro-batch, from the last block's output.

        The head's parameters are its own, and those tied to the embedding.
        """
        rows = self.rows(inputs, index)

        def twice() -> tuple:
            wide = twice_the_rows(rows)
            return variables, self.hidden_of(wide), wide

        args, own = (variables, hidden, rows), BatchRows(num_rows(rows), twice)
        return self.draws.call(self._head, key.fold_in(index), args, own)

    def call(self, inputs: Inputs, index: jax.Array, key: ShardKey) -> Call:
        """The arguments with which the loss function calls the model."""
        rows, key = self.rows(inputs, index), key.fold_in(index)
        own = BatchRows(num_rows(rows), lambda: (twice_the_rows(rows),))
        return self.draws.call(self.call_of, key, (rows,), own)

    def call_of(self, key: jax.Array, rows: Inputs) -> Call:
        """As `call`, of a micro-batch's rows."""
        loss = functools.partial(self.loss, key=key, training=self.training)
        call = inputs_of(loss, rows, training=self.training)
        return dataclasses.replace(call, step=rows.step.value)

    def hidden_of(self, rows: Inputs, before: SectionNetwork | None = None) -> PyTree:
        """The shapes of a hidden state.

        Args:
          rows: a micro-batch.
          before: the section whose predecessor returns it; None for the head.
        """
        key = jax.eval_shape(lambda: jax.random.key(0))
        params, state = jax.eval_shape(self.network.init, key)
        own = params["embed"], state.get("embed", {})
        hidden, _ = jax.eval_shape(self._embed, key, own, rows)
        call = jax.eval_shape(self.call_of, key, rows)
        for section in self.network.sections:
            if section is before:
                break
            name = section.between_name
            own = params.get(name), state.get(name, {})
            between = functools.partial(self._between, section)
            hidden, _ = jax.eval_shape(between, key, own, hidden, call)
        return hidden

    def _embed(
        self, key: jax.Array, variables: Variables, rows: Inputs
    ) -> tuple[PyTree, PyTree]:
        call = self.call_of(key, rows)
        return self.network.run_embed(variables, call, key, training=self.training)

    def _between(
        self,
        section: SectionNetwork,
        key: jax.Array,
        variables: Variables,
        hidden: PyTree,
        call: Call,
    ) -> tuple[PyTree, PyTree]:
        return self.network.run_between(
            section, variables, hidden, call, key, training=self.training
        )

    def _head(
        self,
        key: jax.Array,
        variables: tuple[HeadParams, PyTree],
        hidden: PyTree,
        rows: Inputs,
    ) -> tuple[Sums, PyTree]:
        (params, tied), state = variables

        def answer(call: Call) -> Any:
            nonlocal state
            call = dataclasses.replace(call, step=rows.step.value)
            out, state = self.network.run_head(
                (params, state), tied, hidden, call, key, training=self.training
            )
            return out

        model = ModelProxy(answer, training=self.training)
        out = self.loss(model, rows, key=key, training=self.training)
        return loss_sums(out, rows), state


@dataclasses.dataclass(frozen=True)
class SectionFunctions:
    """A section's blocks, and the part before them, as pure functions.

    Attributes:
      whole: embedding and head.
      section: the section.
      stages: which of its blocks are on which stage.
    """

    whole: StageFunctions
    section: SectionNetwork
    stages: Stages

    @property
    def training(self) -> bool:
        """False to evaluate."""
        return self.whole.training

    def parted(self, blocks: Params) -> tuple[Params, Params]:
        """The blocks' parameters that are trained, and the others."""
        return self.whole.parted(self.section.name, blocks)

    @property
    def _policy(self) -> str:
        # The backward already recomputes the chunk from its input; "full" on each block
        # would run every block a third time.
        policy = self.whole.network.remat
        return "none" if policy == "full" else policy

    def between(
        self,
        variables: Variables,
        hidden: PyTree,
        inputs: Inputs,
        index: jax.Array,
        key: ShardKey,
    ) -> tuple[PyTree, PyTree]:
        """Run the part before the section; also its new state."""
        whole, rows = self.whole, self.whole.rows(inputs, index)
        call = whole.call(inputs, index, key)

        def twice() -> tuple:
            wide = twice_the_rows(rows)
            own = jax.eval_shape(whole.call_of, key.key, wide)
            return variables, whole.hidden_of(wide, before=self.section), own

        args, own = (variables, hidden, call), BatchRows(num_rows(rows), twice)
        run = functools.partial(whole._between, self.section)
        return whole.draws.call(run, key.fold_in(index), args, own)

    def block_on(self, rows: Inputs) -> Callable[..., tuple[PyTree, PyTree]]:
        """Make one block.

        It is ``(params, hidden, frozen, state, number, is_run, call, key) -> (hidden,
        state)``, of the parameters that are trained, and the others. In an idle place
        it returns `hidden` and `state`.

        Args:
          rows: a micro-batch; only its shapes are used.
        """
        whole = self.whole

        def block(params, hidden, frozen, state, number, is_run, call, key):
            params = tree.merged(params, frozen)

            def twice() -> tuple:
                wide = twice_the_rows(rows)
                call_of = jax.eval_shape(whole.call_of, key.key, wide)
                return (params, state), self._hidden_of(wide), number, call_of

            args = (params, state), hidden, number, call
            out = whole.draws.call(
                self._block, key, args, BatchRows(num_rows(rows), twice)
            )
            if self.stages.idle_places:
                return optax.tree.where(is_run, out, (hidden, state))
            return out

        return block

    def places(
        self, virtual: jax.Array, inputs: Inputs, index: jax.Array, key: ShardKey
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[Call, ShardKey]]:
        """Arguments of a virtual stage's blocks besides their input.

        Args:
          virtual: the virtual stage, counted from the section's first.
          inputs: this data shard's rows.
          index: the micro-batch.
          key: the step's key.

        Returns:
          By place, [n]: the block's index and whether it is run; and for all blocks the
          call of the model and the micro-batch's key.
        """
        places = jnp.arange(self.stages.places)
        numbers = jnp.asarray(self.stages.firsts)[virtual] + places
        is_run = places < jnp.asarray(self.stages.counts)[virtual]
        call = self.whole.call(inputs, index, key)
        return (numbers, is_run), (call, key.fold_in(index))

    def _block(
        self,
        key: jax.Array,
        variables: Variables,
        hidden: PyTree,
        number: jax.Array,
        call: Call,
    ) -> tuple[PyTree, PyTree]:
        whole = self.whole
        return whole.network.run_block(
            self.section,
            variables,
            hidden,
            number,
            call,
            key,
            training=whole.training,
            policy=self._policy,
        )

    def _hidden_of(self, rows: Inputs) -> PyTree:
        """The shapes of the hidden state between the blocks."""
        sections = self.whole.network.sections
        after = sections.index(self.section) + 1
        before = sections[after] if after < len(sections) else None
        return self.whole.hidden_of(rows, before=before)
