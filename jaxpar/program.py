"""What is compiled: the step and the evaluation, their shardings and donation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.batches import BatchSpec
from jaxpar.layout import Layout
from jaxpar.state import TrainState
from jaxpar.types import Batch, Metrics
from jaxpar.xla_settings import compiler_options


@dataclasses.dataclass(frozen=True)
class Program:
    """An engine's compiled functions.

    Attributes:
      step: ``(leaves, batch) -> (leaves, metrics, exhausted)``; donates the leaves. The
        last is a list: of one flag where the loss is scaled, else empty.
      evaluate: ``(params, model_state, batch, key, is_kept) -> metrics``; parameters as
        they are kept, or (`is_kept` false) the logical ones.
    """

    step: jax.stages.Wrapped
    evaluate: jax.stages.Wrapped


def make_program(
    layout: Layout,
    batch_spec: BatchSpec,
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    evaluation: Callable[..., Metrics],
) -> Program:
    """Name what is compiled; nothing is compiled before its first call.

    Args:
      layout: where every leaf of the state is stored.
      batch_spec: the shapes of a global batch.
      step: the pure training step.
      evaluation: the pure evaluation.
    """
    mesh = batch_spec.mesh
    stored, structure = jax.tree.flatten(layout.kept_shardings)
    replicated = NamedSharding(mesh, P())

    def flat_step(state: list, batch: Batch) -> tuple[list, Metrics, list]:
        with _on(mesh):
            new, metrics = step(jax.tree.unflatten(structure, state), batch)
        watched = [new.loss_scale.exhausted] if layout.precision.scales_loss else []
        return jax.tree.leaves(new), metrics, watched

    def evaluate(params, model_state, batch, key, is_kept) -> Metrics:
        with _on(mesh):
            computed = layout.update.computed(params) if is_kept else params
            return evaluation(computed, model_state, batch, key)

    return Program(
        step=jax.jit(
            flat_step,
            in_shardings=(stored, batch_spec.sharding),
            out_shardings=(stored, replicated, replicated),
            donate_argnums=0,
            compiler_options=compiler_options(layout.settings),
        ),
        evaluate=jax.jit(evaluate, out_shardings=replicated, static_argnums=4),
    )


def _on(mesh: Mesh) -> Any:
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
