"""Would other devices have computed the same step?

With ZeRO a shard has no replica, so that nothing else notices a device that computes
wrong numbers. Here a step is taken again, from a copy of the state before it, on the
same mesh with its devices shifted by one place: each logical shard is computed by
another device, and both results are compared, shard by shard. Where they differ a third
run, shifted by two places, says which of the two was wrong. That names the device whose
own result is wrong; an error in one device's gradient, which collectives spread, is
found, but whose it was is not seen.

XLA:CPU computes the same bits wherever a shard is. Elsewhere sums may be in another
order: at the first comparison the step and two replays are compared with each other,
and what they differ by is the tolerance.

Source: Dixit et al., "Silent Data Corruptions at Scale" (2021), for what is looked for.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.engine.loss_step import LossStep, unknown_loss
from jaxpar.engine.make_run import make_losses, make_run
from jaxpar.engine.placement import Placement
from jaxpar.engine.replay_results import Results, describe, differences
from jaxpar.engine.replicas import CorruptionError, Probe, make_hashed
from jaxpar.sharding.shifted import moved, shifted_mesh
from jaxpar.step.update import HostUpdate
from jaxpar.tree import named_leaves
from jaxpar.types import Batch, Metrics

FACTOR = 8.0
"""The tolerance is as many times what the runs at the start differ by."""

MOST_ROUNDING = 1e-2
"""Of the norm of a shard: runs at the start that differ by more are not rounding."""


class Replays:
    """Compares steps of an engine with replays on shifted devices: `Engine.replays`.

    ``begin(batch)``, ``engine.step(batch)``, ``check(metrics)``, in this order; each
    waits for the devices. With several processes all call them.

    Memory: of a second state on every device; of a third one where results are compared
    to a tolerance, and while it is measured. Time: of a second step, copies of the
    state, and of the compilation of the step for the shifted devices, once.

    Args:
      placement: where every leaf of the state is stored.
      losses: loss -> its step.
      arguments: of `jaxpar.initialize`, to make the steps on shifted devices.
      leaves: the engine's as they are, once no program runs.

    Attributes:
      tolerance: the most that a shard may differ by, as a fraction of its norm: 0 for
        no bit; None until it is measured.

    Raises:
      ValueError: if the step can't be replayed.
    """

    def __init__(
        self,
        placement: Placement,
        losses: Mapping[str | None, LossStep],
        arguments: Mapping[str, Any],
        leaves: Callable[[], list[jax.Array]],
    ):
        _require_replayable(placement)
        self._losses, self._leaves = losses, leaves
        self._arguments = {**arguments, "other_shapes": _other_shapes(losses)}
        is_cpu = placement.mesh.devices.flat[0].platform == "cpu"
        self.tolerance: float | None = 0.0 if is_cpu else None
        self._runs = [_Run(placement.mesh, placement, losses)]
        self._votes = placement.mesh.size > 2
        self._begun: _Begun | None = None

    def begin(self, batch: Batch, *, loss: str | None = None) -> None:
        """Replay a step that is about to be taken.

        Args:
          batch: of the step, as `Engine.step` takes it.
          loss: which of several losses.

        Raises:
          ValueError: as `Engine.step`.
        """
        self._begun = None
        if loss not in self._losses:
            raise ValueError(unknown_loss(loss, self._losses))
        own, placed = self._losses[loss].put(batch)
        place = (loss, [self._losses[loss], *self._losses[loss].others].index(own))
        rows, structure = jax.tree.flatten(placed)
        before, first = self._leaves(), self._shifted(1)
        replayed = first.take(
            place,
            moved(before, first.mesh),
            moved(rows, first.mesh),
            structure,
            keep=self.tolerance != 0,
        )
        kept = None
        if self._votes:
            second = shifted_mesh(self._runs[0].mesh, 2)
            kept = moved(before, second), moved(rows, second)
        self._begun = _Begun(place, replayed, kept, structure)

    def check(self, metrics: Metrics) -> None:
        """Compare the step that was taken with its replay.

        Args:
          metrics: as `Engine.step` returned them.

        Raises:
          CorruptionError: if they differ; it names leaves, slices, and the device that
            a third run shows to be wrong, if it is one.
          RuntimeError: if `begin` was not called before the step.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            raise RuntimeError("check: call begin(batch) before the step.")
        keep = self.tolerance != 0
        taken = self._runs[0].results(self._leaves(), metrics, keep=keep)
        runs = [taken, begun.replayed]
        if self.tolerance is None:
            runs += self._vote(begun, keep=True)
            self.tolerance = _measured(runs)
        if not differences(runs[0], runs[1], self.tolerance).any():
            return
        if len(runs) < 3:
            runs += self._vote(begun, keep=keep)
        raise CorruptionError(describe(runs, self.tolerance))

    def _vote(self, begun: "_Begun", *, keep: bool) -> list[Results]:
        """The result of a second replay; empty if there are too few devices."""
        if begun.kept is None:
            return []
        given = *begun.kept, begun.structure
        return [self._shifted(2).take(begun.place, *given, keep=keep)]

    def _shifted(self, by: int) -> "_Run":
        """The step on devices that are shifted; made at its first use."""
        while len(self._runs) <= by:
            mesh = shifted_mesh(self._runs[0].mesh, len(self._runs))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # They were said of the engine.
                made = make_run(self._arguments, mesh)
            losses = make_losses(made, self._arguments)
            self._runs.append(_Run(mesh, made.placement, losses))
        return self._runs[by]


_Place = tuple[str | None, int]
"""A loss, and which of its shapes of a batch."""


@dataclasses.dataclass(frozen=True)
class _Begun:
    """A step whose replay is done.

    Attributes:
      place: the step.
      replayed: the replay's results.
      kept: the state and the batch before the step, on the devices of a second replay,
        which has them in place of a first one's: no device has two copies.
      structure: of the batch.
    """

    place: _Place
    replayed: Results
    kept: tuple[list[jax.Array], list[jax.Array]] | None
    structure: Any


class _Run:
    """The step on devices in one order."""

    def __init__(
        self,
        mesh: Mesh,
        placement: Placement,
        losses: Mapping[str | None, LossStep],
    ):
        self.mesh, self._losses = mesh, losses
        self._shardings = named_leaves(placement.packed_shardings)
        self._hashed = make_hashed(mesh)

    def take(
        self,
        place: _Place,
        leaves: list[jax.Array],
        rows: list[jax.Array],
        structure: Any,
        *,
        keep: bool,
    ) -> Results:
        """Take the step, which donates the leaves."""
        loss, shape = place
        own = self._losses[loss]
        step = [own, *own.others][shape]
        new, metrics, _ = step.stepped(leaves, jax.tree.unflatten(structure, rows))
        return self.results(new, metrics, keep=keep)

    def results(
        self, leaves: Sequence[jax.Array], metrics: Metrics, *, keep: bool
    ) -> Results:
        """The hashes of a step's results, and the results if they are kept."""
        whole = NamedSharding(self.mesh, P())
        named = {f"metrics/{name}": x for name, x in named_leaves(metrics).items()}
        places = {**self._shardings, **dict.fromkeys(named, whole)}
        arrays = [*leaves, *named.values()]
        hashes = Probe(self.mesh, places, self._hashed).hashes(arrays)
        shapes = tuple(x.shape for x in arrays)
        return Results(self.mesh, places, shapes, hashes, arrays if keep else None)


def _measured(runs: Sequence[Results]) -> float:
    """The tolerance, from runs of the same step at the start.

    Raises:
      CorruptionError: if they differ by more than rounding.
    """
    pairs = [(a, b) for i, a in enumerate(runs) for b in runs[i + 1 :]]
    most = max(float(a.distances(b).max()) for a, b in pairs)
    if most > MOST_ROUNDING:
        raise CorruptionError(
            f"at the start {describe(runs, MOST_ROUNDING)} They differ by {most:.2g} "
            f"of a shard's norm, and rounding by {MOST_ROUNDING:g} at most."
        )
    return FACTOR * most


def _other_shapes(losses: Mapping[str | None, LossStep]) -> tuple[Batch, ...]:
    """The shapes of further batches, which an engine of one loss may take."""
    own = losses.get(None)
    others = own.others if own else ()
    return tuple(x.batch_spec.rows(x.batch_spec.num_rows) for x in others)


def _require_replayable(placement: Placement) -> None:
    """Raise for a step that can't be taken again elsewhere.

    Raises:
      ValueError: if there is one device, or the host has a part in the update.
    """
    placement.require_devices("replays")
    if placement.mesh.size == 1:
        raise ValueError(
            "replays: the mesh has one device, and a replay needs another one. Leave "
            "it out, or use two devices or more (three, to know which one is wrong)."
        )
    if isinstance(placement.update, HostUpdate):
        raise ValueError(
            "replays: with this offload= or optimizer= the host computes the update, "
            "in memory or on a disk that has one state: it can't be taken twice. Leave "
            "replays out, or use Offload(optimizer='host', update='device')."
        )
