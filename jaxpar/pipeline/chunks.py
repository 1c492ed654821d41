"""How is a chunk of blocks run forwards and backwards, block by block?

The forward saves either the chunk's input, and the backward recomputes the chunk, or
every block's residuals. If the backward is split, its first half passes the operands of
the weight gradients' matmuls to its second half. The backward sees the mutable state
that the forward saw, also after later micro-batches changed it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxpar.pipeline.backward import Pullback, run_and_keep, trace_pullback
from jaxpar.pipeline.stage_functions import SectionFunctions
from jaxpar.step.inputs import Inputs
from jaxpar.step.row_draws import ShardKey
from jaxpar.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class ChunkWork:
    """One micro-batch on one virtual stage.

    Attributes:
      virtual: the virtual stage; for `Chunks`, counted from its section's first.
      inputs: this data shard's rows.
      index: the micro-batch.
      key: the step's key.
      state: what the forward saw of the mutable state: part -> that of the chunk's
        blocks, [n, ...]; for `Chunks`, that of its section.
    """

    virtual: jax.Array
    inputs: Inputs
    index: jax.Array
    key: ShardKey
    state: PyTree = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The forward and backward of a stage's chunks of one section.

    Attributes:
      functions: the blocks.
      keeps: whether the forward saves every block's residuals; otherwise the backward
        recomputes the chunk from its input.
      splits: whether weight gradients are computed separately.
    """

    functions: SectionFunctions
    keeps: bool
    splits: bool

    def forward(
        self, blocks: Params, hidden: PyTree, work: ChunkWork
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Run a chunk.

        Returns:
          Its output, the residuals for the backward, and the blocks' state.
        """
        if self.keeps and self.functions.training:
            return self._run_and_keep(blocks, hidden, work)
        layers, shared = self._arguments(blocks, work)
        block = self._block(work)

        def step(hidden: PyTree, layer: tuple) -> tuple[PyTree, PyTree]:
            params, *rest = layer
            return block(params, hidden, *rest, *shared)

        out, state = jax.lax.scan(step, hidden, layers)
        return out, [], state

    def backward(
        self,
        blocks: Params,
        hidden: PyTree,
        kept: PyTree,
        cotangent: PyTree,
        work: ChunkWork,
    ) -> tuple[Params, PyTree, PyTree]:
        """Run a chunk backwards.

        Args:
          blocks: the chunk's parameters, [n, ...].
          hidden: its input; not read if the forward saves residuals.
          kept: the residuals from `forward`.
          cotangent: the cotangent of its output.
          work: the micro-batch.

        Returns:
          Gradients of the parameters that are trained, except those that `weights`
          computes; the gradient of the input; and the inputs of `weights`.
        """
        if not self.keeps:
            _, kept, _ = self._run_and_keep(blocks, hidden, work)
        (params, *own), shared = self._arguments(blocks, work)
        pullback = self._pullback(blocks, cotangent, work)

        def step(cotangent: PyTree, layer: tuple) -> tuple[PyTree, tuple]:
            params, kept, *rest = layer
            arguments = (params, (*rest, *shared))
            if self.splits:
                grads, cotangent, late = pullback.run_input(kept, arguments, cotangent)
                return cotangent, (grads, late)
            grads, cotangent = pullback.run(kept, arguments, cotangent)
            return cotangent, (grads, [])

        layers = (params, kept, *own)
        cotangent, made = jax.lax.scan(step, cotangent, layers, reverse=True)
        return made[0], cotangent, made[1]

    def weights(
        self, blocks: Params, hidden: PyTree, products: PyTree, work: ChunkWork
    ) -> Params:
        """Compute the gradients that `backward` deferred; zeros for the others."""
        pullback = self._pullback(blocks, hidden, work)

        def step(_: None, products: Any) -> tuple[None, Params]:
            return None, pullback.run_weights(products)

        places = self.functions.stages.places
        return jax.lax.scan(step, None, products, length=places)[1]

    def _run_and_keep(
        self, blocks: Params, hidden: PyTree, work: ChunkWork
    ) -> tuple[PyTree, PyTree, PyTree]:
        layers, shared = self._arguments(blocks, work)
        block = self._block(work)

        def step(hidden: PyTree, layer: tuple) -> tuple[PyTree, tuple]:
            params, *rest = layer
            out, kept, state = run_and_keep(block, params, hidden, *rest, *shared)
            return out, (kept, state)

        out, (kept, state) = jax.lax.scan(step, hidden, layers)
        return out, kept, state

    def _arguments(self, blocks: Params, work: ChunkWork) -> tuple[tuple, tuple]:
        """A block's arguments besides its input: its own, [n, ...], and all's.

        The first of its own are the parameters that are trained.
        """
        given = work.virtual, work.inputs, work.index, work.key
        places, shared = self.functions.places(*given)
        return (*self.functions.parted(blocks), work.state, *places), shared

    def _pullback(self, blocks: Params, hidden: PyTree, work: ChunkWork) -> Pullback:
        layers, shared = self._arguments(blocks, work)
        params, *own = jax.tree.map(lambda x: x[0], layers)
        return trace_pullback(self._block(work), params, hidden, *own, *shared)

    def _block(self, work: ChunkWork) -> Callable[..., tuple[PyTree, PyTree]]:
        rows = self.functions.whole.rows(work.inputs, work.index)
        return self.functions.block_on(rows)
