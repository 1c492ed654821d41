"""How does a stage run a chunk of any of a model's sections, and its backward?

A chunk's section depends on the stage and the tick, so all sections are branches of one
`jax.lax.switch`. Hidden states of one shape are of one kind; where sections have
several, a stage's value is a tuple of all kinds, of which one is used. The part before
a section runs on its first virtual stage. A model of one section has no branches.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.pipeline.buffers import unused_like
from jaxpar.pipeline.chunks import Chunks, ChunkWork
from jaxpar.pipeline.stage_functions import SectionFunctions, StageFunctions
from jaxpar.pipeline.stages import Division, Stages
from jaxpar.step.inputs import Inputs
from jaxpar.step.row_draws import ShardKey
from jaxpar.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class Sections:
    """The forward and backward of the chunks of all sections.

    Parameters are {section, or part between two: its own}; a chunk's of sections are
    [n, ...].

    Attributes:
      functions: embedding and head.
      division: which blocks are on which stage.
      keeps: whether forwards save every block's residuals.
      splits: whether weight gradients are computed separately.
      shapes: of the kinds of hidden states in this step (`of_step`).
    """

    functions: StageFunctions
    division: Division
    keeps: bool
    splits: bool
    shapes: tuple[PyTree, ...] = ()

    @functools.cached_property
    def chunks(self) -> tuple[Chunks, ...]:
        """Of each section."""
        sections = self.functions.network.sections
        return tuple(
            Chunks(
                SectionFunctions(self.functions, own, stages), self.keeps, self.splits
            )
            for own, stages in zip(sections, self.division.sections, strict=True)
        )

    @functools.cached_property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the sections, and of the parts between them."""
        sections = self.functions.network.sections
        between = tuple(s.between_name for s in sections if s.between is not None)
        return tuple(s.name for s in sections), between

    # Kinds of hidden states.

    @functools.cached_property
    def _kinds(self) -> list[Any]:
        """The kinds, each by its structure, shapes and dtypes in the sample batch."""
        found: list[Any] = []
        for section in self.functions.network.sections:
            for hidden in (section.before, section.hidden):
                if _kind(hidden) not in found:
                    found.append(_kind(hidden))
        return found

    def first(self, hidden: PyTree) -> PyTree:
        """The first section's input, from a stage's value."""
        return self._pick(self.functions.network.sections[0].before, hidden)

    def last(self, hidden: PyTree) -> PyTree:
        """The last section's output, from a stage's value."""
        return self._pick(self.functions.network.sections[-1].hidden, hidden)

    def of_first(self, hidden: PyTree) -> PyTree:
        """A stage's value that has the first section's input."""
        return self._wrap(self.functions.network.sections[0].before, hidden)

    def of_last(self, hidden: PyTree) -> PyTree:
        """A stage's value that has the last section's output."""
        return self._wrap(self.functions.network.sections[-1].hidden, hidden)

    def of_step(self, params: Params, inputs: Inputs, key: ShardKey) -> "Sections":
        """The same with the shapes of a step's hidden states.

        Args:
          params: the step's, in the compute dtype.
          inputs: this data shard's rows.
          key: the step's key.
        """
        index = jnp.int32(0)
        embed = self.functions.embed
        hidden = jax.eval_shape(embed, params["embed"], inputs, index, key)
        found = {0: hidden}
        for own in self.chunks:
            section = own.functions.section
            if section.between is not None:
                given = params[section.between_name], hidden, inputs, index, key
                hidden = jax.eval_shape(own.functions.between, *given)
            found[self._kinds.index(_kind(section.hidden))] = hidden
        shapes = tuple(found[place] for place in range(len(self._kinds)))
        return dataclasses.replace(self, shapes=shapes)

    @property
    def structs(self) -> PyTree:
        """The shapes of a stage's value."""
        return self.shapes[0] if len(self.shapes) == 1 else self.shapes

    def _pick(self, like: PyTree, hidden: PyTree) -> PyTree:
        if len(self._kinds) == 1:
            return hidden
        return hidden[self._kinds.index(_kind(like))]

    def _wrap(self, like: PyTree, hidden: PyTree) -> PyTree:
        if len(self._kinds) == 1:
            return hidden
        return tuple(_among(self._kinds.index(_kind(like)), hidden, self.shapes))

    # What a slot does.

    def forward(
        self, params: Params, hidden: PyTree, work: ChunkWork
    ) -> tuple[PyTree, PyTree]:
        """Run a chunk; returns its output and the residuals for the backward."""
        runs = [functools.partial(self._forward, own) for own in self.chunks]
        if len(runs) == 1:
            return runs[0](params, hidden, work)
        kept = [jax.eval_shape(lambda r=r: r(params, hidden, work)[1]) for r in runs]

        def branch(number: int) -> Callable[[], tuple]:
            def run() -> tuple[PyTree, PyTree]:
                out, own = runs[number](params, hidden, work)
                return out, _among(number, own, kept)

            return run

        return self._switch(work, branch)

    def backward(
        self,
        params: Params,
        hidden: PyTree,
        kept: PyTree,
        cotangent: PyTree,
        work: ChunkWork,
    ) -> tuple[Params, PyTree, PyTree]:
        """Run a chunk backwards.

        Args:
          params: of all sections, of the chunk (the nearest of other sections).
          hidden: the chunk's input; not read if the forward saves residuals.
          kept: the residuals from `forward`.
          cotangent: the cotangent of its output.
          work: the micro-batch.

        Returns:
          Gradients in the structure of `params`, except those that `weights` computes;
          the gradient of the input; and the inputs of `weights`.
        """
        runs = [functools.partial(self._backward, own) for own in self.chunks]
        if len(runs) == 1:
            return runs[0](params, hidden, kept, cotangent, work)
        made = [
            jax.eval_shape(
                lambda r=run, i=i: r(params, hidden, _of(i, kept), cotangent, work)[2]
            )
            for i, run in enumerate(runs)
        ]

        def branch(number: int) -> Callable[[], tuple]:
            def run() -> tuple[Params, PyTree, PyTree]:
                given = params, hidden, _of(number, kept), cotangent, work
                grads, sent_back, products = runs[number](*given)
                zeros = jax.tree.map(jnp.zeros_like, params)
                return zeros | grads, sent_back, _among(number, products, made)

            return run

        return self._switch(work, branch)

    def weights(
        self, params: Params, hidden: PyTree, products: PyTree, work: ChunkWork
    ) -> Params:
        """Compute the gradients that `backward` deferred; zeros for the others."""

        def run(own: Chunks, products: PyTree) -> Params:
            section = own.functions.section
            given = params[section.name], self._pick(section.hidden, hidden)
            return {section.name: own.weights(*given, products, _local(own, work))}

        if len(self.chunks) == 1:
            return run(self.chunks[0], products)

        def branch(number: int) -> Callable[[], Params]:
            zeros = functools.partial(jax.tree.map, jnp.zeros_like, params)
            return lambda: zeros() | run(self.chunks[number], _of(number, products))

        return self._switch(work, branch)

    def chunk_of(self, params: Params, chunk: jax.Array) -> Params:
        """A chunk's parameters, from one stage's."""
        return params | {
            stages.name: stages.chunk_of(params[stages.name], chunk)
            for stages in self.division.sections
        }

    def add_chunk(self, grads: Params, made: Params, chunk: jax.Array) -> Params:
        """Add a chunk's gradients to one stage's."""
        stages: dict[str, Stages] = {own.name: own for own in self.division.sections}
        return {
            name: stages[name].add_chunk(own, made[name], chunk)
            if name in stages
            else jax.tree.map(jnp.add, own, made[name])
            for name, own in grads.items()
        }

    def _switch(self, work: ChunkWork, branch: Callable[[int], Callable]) -> Any:
        chunk = work.virtual // self.division.num_stages
        section = jnp.asarray(self.division.section_of_chunk)[chunk]
        return jax.lax.switch(section, [branch(i) for i in range(len(self.chunks))])

    def _forward(
        self, own: Chunks, params: Params, hidden: PyTree, work: ChunkWork
    ) -> tuple[PyTree, PyTree]:
        section, local = own.functions.section, _local(own, work)
        entered = self._entered(own, params, hidden, local)
        out, kept = own.forward(params[section.name], entered, local)
        if section.between is not None and self.keeps:
            kept = (kept, self._pick(section.before, hidden))
        return self._wrap(section.hidden, out), kept

    def _backward(
        self,
        own: Chunks,
        params: Params,
        hidden: PyTree,
        kept: PyTree,
        cotangent: PyTree,
        work: ChunkWork,
    ) -> tuple[Params, PyTree, PyTree]:
        section, local = own.functions.section, _local(own, work)
        cotangent = self._pick(section.hidden, cotangent)
        before = self._pick(section.before, hidden)
        if section.between is not None and self.keeps:
            kept, before = kept
        entered = self._pick(section.hidden, hidden)
        if not self.keeps:
            entered = self._entered(own, params, hidden, local)
        grads, cotangent, products = own.backward(
            params[section.name], entered, kept, cotangent, local
        )
        if section.between is None:
            sent_back = self._wrap(section.hidden, cotangent)
            return {section.name: grads}, sent_back, products

        def leave() -> tuple[Params, PyTree]:
            def run(params: Params, hidden: PyTree) -> PyTree:
                given = local.inputs, local.index, local.key
                return own.functions.between(params, hidden, *given)

            _, pull = jax.vjp(run, params[section.between_name], before)
            return pull(cotangent)

        def stay() -> tuple[Params, PyTree]:
            return jax.tree.map(jnp.zeros_like, (params[section.between_name], before))

        is_first = local.virtual == 0
        made, first_back = jax.lax.cond(is_first, leave, stay)
        sent_back = optax.tree.where(
            is_first,
            self._wrap(section.before, first_back),
            self._wrap(section.hidden, cotangent),
        )
        return {section.name: grads, section.between_name: made}, sent_back, products

    def _entered(
        self, own: Chunks, params: Params, hidden: PyTree, local: ChunkWork
    ) -> PyTree:
        """The input of a chunk's first block."""
        section = own.functions.section
        if section.between is None:
            return self._pick(section.hidden, hidden)

        def enter() -> PyTree:
            given = local.inputs, local.index, local.key
            before = self._pick(section.before, hidden)
            return own.functions.between(params[section.between_name], before, *given)

        return jax.lax.cond(
            local.virtual == 0, enter, lambda: self._pick(section.hidden, hidden)
        )


def _kind(hidden: PyTree) -> tuple:
    leaves, structure = jax.tree.flatten(hidden)
    return structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def _local(own: Chunks, work: ChunkWork) -> ChunkWork:
    """A chunk's work with its virtual stage counted from its section's first."""
    stages = own.functions.stages
    first = stages.first_chunk * stages.num_stages
    return dataclasses.replace(work, virtual=work.virtual - first)


def _among(number: int, own: PyTree, shapes: Sequence[PyTree]) -> list[PyTree]:
    """One section's value beside unused ones of the others; [] if all are empty."""
    if not jax.tree.leaves(list(shapes)):
        return []
    return [
        own if place == number else unused_like(shape)
        for place, shape in enumerate(shapes)
    ]


def _of(number: int, values: Sequence[PyTree]) -> PyTree:
    """One section's value of `_among`."""
    return values[number] if values else []
