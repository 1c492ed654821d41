"""How does an engine take batches of several shapes: by a step for each, on one state?

``initialize(other_shapes=[...])``: shorter rows, or another number of them. A shape has
a program of its own, which is compiled when the first such batch comes. The state,
where it is stored, and its optimizer are those of `sample_batch`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.engine.batches import BatchSpec, make_batch_spec
from jaxpar.engine.make_step import MadeStep, make_step
from jaxpar.engine.read_arguments import LossSpec, RunSpec
from jaxpar.engine.two_batches import halves_of
from jaxpar.model.bridge import make_network
from jaxpar.types import Batch


def with_other_shapes(
    run: RunSpec, own: LossSpec, made: MadeStep, arguments: Mapping[str, Any]
) -> MadeStep:
    """A loss's step, with those of the other shapes of its batches.

    Args:
      run: as for `jaxpar.engine.make_step.make_step`.
      own: the loss, with `sample_batch`.
      made: its step.
      arguments: of `jaxpar.initialize`.

    Raises:
      ValueError: if a batch differs from `sample_batch` in more than shapes, the mesh,
        the schedule or the model can't take its shapes, or the schedule is
        asynchronous.
    """
    known, others = [own.batch_spec], []
    samples = _listed(arguments["other_shapes"])
    if samples and made.spec.execution.delay:
        raise ValueError(
            f"other_shapes: with schedule={run.schedule!r} batches are under way from "
            "one step to the next, which must be of one shape; leave it out, or choose "
            "a schedule that ends its steps, such as '1f1b'."
        )
    for number, sample in enumerate(samples):
        argument = f"other_shapes[{number}]"
        spec = _read(run, own, sample, argument)
        _check_new(argument, spec.batch_spec, known)
        known.append(spec.batch_spec)
        try:
            loss = spec.loss.on_sample
            network = make_network(arguments["model"], loss, spec.rows)
            others.append(make_step(run, spec, network, first=made))
        except ValueError as error:
            raise ValueError(f"{argument}: {error}") from error
    return dataclasses.replace(made, others=tuple(others))


def scaled(accumulate: int, rows: int, sample_rows: int) -> int:
    """Micro-batches of a batch, so that each has as many rows as one of the sample's.

    Args:
      accumulate: micro-batches of `sample_batch`.
      rows: of the batch.
      sample_rows: of `sample_batch`.

    Returns:
      ``accumulate * rows / sample_rows`` where that is a whole number, else
      `accumulate`.

    Example:
      >>> scaled(4, 8, 16), scaled(4, 32, 16), scaled(1, 8, 16)
      (2, 8, 1)
    """
    found, rest = divmod(accumulate * rows, sample_rows)
    return found if found and not rest else accumulate


def _listed(given: Any) -> Sequence[Batch]:
    if not isinstance(given, list | tuple):
        raise ValueError(
            f"other_shapes={type(given).__name__} must be a list or a tuple of further "
            "sample batches; for one batch write other_shapes=[batch]."
        )
    return given


def _read(run: RunSpec, own: LossSpec, sample: Batch, argument: str) -> LossSpec:
    """The loss with another batch."""
    first = own.batch_spec
    one = make_batch_spec(sample, run.mesh, 1, argument=argument)
    accumulate = scaled(own.accumulate, one.num_rows, first.num_rows)
    try:
        given = sample, run.mesh, accumulate
        spec = make_batch_spec(*given, argument=argument)
    except ValueError as error:
        kept = f"{own.accumulate} x {one.num_rows} / {first.num_rows}"
        raise ValueError(
            f"{error} (accumulate here is {accumulate}: {kept}, by the rows of "
            f"sample_batch, where that is a whole number, else {own.accumulate}.)"
        ) from error
    _check_leaves(argument, spec, first)
    halves = halves_of(run.two_batch_overlap, run.mesh, spec, accumulate)
    changed = {"batch_spec": spec, "accumulate": accumulate, "halves": halves}
    return dataclasses.replace(own, **changed)


def _check_leaves(argument: str, spec: BatchSpec, first: BatchSpec) -> None:
    """Raise for a batch that differs from the sample in more than shapes."""
    if (spec.structure, spec.replicated) != (first.structure, first.replicated):
        raise ValueError(
            f"{argument}: its structure {spec.structure} differs from that of "
            f"sample_batch, {first.structure}; only shapes may differ."
        )
    for name, leaf in spec.leaves.items():
        right = first.leaves[name]
        if leaf.dtype != right.dtype or leaf.ndim != right.ndim:
            raise ValueError(
                f"{argument}: leaf {name or 'batch'} is {leaf.dtype}{list(leaf.shape)},"
                f" but {right.dtype}{list(right.shape)} in sample_batch; dims may have "
                "other sizes, their number and the dtype must be the same."
            )


def _check_new(argument: str, spec: BatchSpec, known: Sequence[BatchSpec]) -> None:
    """Raise for shapes that another batch has."""
    if any(spec.leaves == other.leaves for other in known):
        raise ValueError(
            f"{argument}: batches of {spec} are taken already, as sample_batch or an "
            "earlier one of other_shapes; leave it out."
        )
