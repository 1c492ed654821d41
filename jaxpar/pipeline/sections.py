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

from jaxpar import tree
from jaxpar.model.model_state import Variables, with_leaves
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
    [n, ...]. So is the mutable state of the parts that have one.

    Attributes:
      functions: embedding and head.
      division: which blocks are on which stage.
      keeps: whether forwards save every block's residuals.
      splits: whether weight gradients are computed separately.
      shapes: of the kinds of hidden states in this step (`of_step`).
      kinds: for each section the kind of what the one before returns, and of its own.
    """

    functions: StageFunctions
    division: Division
    keeps: bool
    splits: bool
    shapes: tuple[PyTree, ...] = ()
    kinds: tuple[tuple[int, int], ...] = ()

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

    def of_step(
        self, variables: Variables, inputs: Inputs, key: ShardKey
    ) -> "Sections":
        """The same with the kinds of a step's hidden states.

        Args:
          variables: the step's parameters, in the compute dtype, and mutable state.
          inputs: this data shard's rows.
          key: the step's key.
        """
        index = jnp.int32(0)
        shapes: dict[tuple, PyTree] = {}
        kinds: list[tuple[int, int]] = []

        def kind_of(hidden: PyTree) -> int:
            leaves, structure = jax.tree.flatten(hidden)
            own = structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
            shapes.setdefault(own, hidden)
            return list(shapes).index(own)

        (params, state), rest = variables, (inputs, index, key)
        given = (params["embed"], state.get("embed", {})), *rest
        hidden, _ = jax.eval_shape(self.functions.embed, *given)
        for own in self.chunks:
            before, section = kind_of(hidden), own.functions.section
            if section.between is not None:
                name = section.between_name
                given = (params[name], state.get(name, {})), hidden, *rest
                hidden, _ = jax.eval_shape(own.functions.between, *given)
            kinds.append((before, kind_of(hidden)))
        return dataclasses.replace(
            self, shapes=tuple(shapes.values()), kinds=tuple(kinds)
        )

    @property
    def structs(self) -> PyTree:
        """The shapes of a stage's value."""
        return self.shapes[0] if len(self.shapes) == 1 else self.shapes

    def first(self, hidden: PyTree) -> PyTree:
        """The first section's input, from a stage's value."""
        return self._pick(self.kinds[0][0], hidden)

    def last(self, hidden: PyTree) -> PyTree:
        """The last section's output, from a stage's value."""
        return self._pick(self.kinds[-1][1], hidden)

    def of_first(self, hidden: PyTree) -> PyTree:
        """A stage's value that has the first section's input."""
        return self._wrap(self.kinds[0][0], hidden)

    def of_last(self, hidden: PyTree) -> PyTree:
        """A stage's value that has the last section's output."""
        return self._wrap(self.kinds[-1][1], hidden)

    def _pick(self, kind: int, hidden: PyTree) -> PyTree:
        return hidden if len(self.shapes) == 1 else hidden[kind]

    def _wrap(self, kind: int, hidden: PyTree) -> PyTree:
        if len(self.shapes) == 1:
            return hidden
        return tuple(_among(kind, hidden, self.shapes))

    def _kinds_of(self, own: Chunks) -> tuple[int, int]:
        """The kinds before and in a section."""
        return self.kinds[self.chunks.index(own)]

    # What a slot does.

    def forward(
        self, params: Params, hidden: PyTree, work: ChunkWork
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Run a chunk.

        Returns:
          Its output; the residuals for the backward; and the state, as `work` has it.
        """
        runs = [functools.partial(self._forward, own) for own in self.chunks]
        if len(runs) == 1:
            return runs[0](params, hidden, work)
        kept = [jax.eval_shape(lambda r=r: r(params, hidden, work)[1]) for r in runs]

        def branch(number: int) -> Callable[[], tuple]:
            def run() -> tuple[PyTree, PyTree, PyTree]:
                out, own, state = runs[number](params, hidden, work)
                return out, _among(number, own, kept), state

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
          Gradients of the parameters that are trained, except those that `weights`
          computes; the gradient of the input; and the inputs of `weights`.
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
                zeros = jax.tree.map(jnp.zeros_like, self.trained(params))
                return zeros | grads, sent_back, _among(number, products, made)

            return run

        return self._switch(work, branch)

    def weights(
        self, params: Params, hidden: PyTree, products: PyTree, work: ChunkWork
    ) -> Params:
        """Compute the gradients that `backward` deferred; zeros for the others."""

        def run(own: Chunks, products: PyTree) -> Params:
            section = own.functions.section
            given = params[section.name], self._pick(self._kinds_of(own)[1], hidden)
            return {section.name: own.weights(*given, products, _local(own, work))}

        if len(self.chunks) == 1:
            return run(self.chunks[0], products)

        def branch(number: int) -> Callable[[], Params]:
            trained = self.trained(params)
            zeros = functools.partial(jax.tree.map, jnp.zeros_like, trained)
            return lambda: zeros() | run(self.chunks[number], _of(number, products))

        return self._switch(work, branch)

    def trained(self, params: Params) -> Params:
        """Of each part, the parameters that are trained."""
        return {part: self.functions.parted(part, params[part])[0] for part in params}

    def chunk_of(self, params: Params, chunk: jax.Array) -> Params:
        """A chunk's parameters or state, from one stage's."""
        return params | {
            stages.name: stages.chunk_of(params[stages.name], chunk)
            for stages in self.division.sections
            if stages.name in params
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

    def put_chunk(self, state: PyTree, made: PyTree, chunk: jax.Array) -> PyTree:
        """Replace a chunk's state in one stage's."""
        return made | {
            stages.name: stages.put_chunk(state[stages.name], made[stages.name], chunk)
            for stages in self.division.sections
            if stages.name in state
        }

    def _switch(self, work: ChunkWork, branch: Callable[[int], Callable]) -> Any:
        chunk = work.virtual // self.division.num_stages
        section = jnp.asarray(self.division.section_of_chunk)[chunk]
        return jax.lax.switch(section, [branch(i) for i in range(len(self.chunks))])

    def _forward(
        self, own: Chunks, params: Params, hidden: PyTree, work: ChunkWork
    ) -> tuple[PyTree, PyTree, PyTree]:
        section, local = own.functions.section, _local(own, work)
        before, after = self._kinds_of(own)
        entered, joint = self._entered(own, params, hidden, work)
        out, kept, state = own.forward(params[section.name], entered, local)
        if section.between is not None and self.keeps:
            kept = (kept, self._pick(before, hidden))
        made = with_leaves({section.between_name: joint, section.name: state})
        return self._wrap(after, out), kept, work.state | made

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
        kinds = self._kinds_of(own)
        cotangent = self._pick(kinds[1], cotangent)
        before, entered = (self._pick(kind, hidden) for kind in kinds)
        if section.between is not None and self.keeps:
            kept, before = kept
        if not self.keeps:
            entered, _ = self._entered(own, params, hidden, work)
        grads, cotangent, products = own.backward(
            params[section.name], entered, kept, cotangent, local
        )
        if section.between is None:
            sent_back = self._wrap(kinds[1], cotangent)
            return {section.name: grads}, sent_back, products

        name = section.between_name
        joint, frozen = self.functions.parted(name, params[name])

        def leave() -> tuple[Params, PyTree]:
            def run(params: Params, hidden: PyTree) -> PyTree:
                variables = tree.merged(params, frozen), work.state.get(name, {})
                given = local.inputs, local.index, local.key
                return own.functions.between(variables, hidden, *given)[0]

            _, pull = jax.vjp(run, joint, before)
            return pull(cotangent)

        def stay() -> tuple[Params, PyTree]:
            return jax.tree.map(jnp.zeros_like, (joint, before))

        is_first = local.virtual == 0
        made, first_back = jax.lax.cond(is_first, leave, stay)
        sent_back = optax.tree.where(
            is_first,
            self._wrap(kinds[0], first_back),
            self._wrap(kinds[1], cotangent),
        )
        return {section.name: grads, name: made}, sent_back, products

    def _entered(
        self, own: Chunks, params: Params, hidden: PyTree, work: ChunkWork
    ) -> tuple[PyTree, PyTree]:
        """The input of a chunk's first block; the state of the part before it."""
        name = own.functions.section.between_name
        before, inside = (self._pick(kind, hidden) for kind in self._kinds_of(own))
        if own.functions.section.between is None:
            return inside, {}
        local, state = _local(own, work), work.state.get(name, {})

        def enter() -> tuple[PyTree, PyTree]:
            given = local.inputs, local.index, local.key
            return own.functions.between((params[name], state), before, *given)

        return jax.lax.cond(local.virtual == 0, enter, lambda: (inside, state))


def _local(own: Chunks, work: ChunkWork) -> ChunkWork:
    """A chunk's work as `Chunks` of its section has it."""
    stages = own.functions.stages
    first = stages.first_chunk * stages.num_stages
    state = work.state.get(stages.name, {})
    return dataclasses.replace(work, virtual=work.virtual - first, state=state)


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
