"""In which shards do runs of the same step differ, and which device was wrong?"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.engine.replicas import device_name
from jaxpar.sharding.memory_kinds import to_device
from jaxpar.sharding.shifted import moved
from jaxpar.tree import to_stored

_NAMED = 4
"""Shards that a message names."""


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """What a step returned.

    Attributes:
      mesh: its devices; the logical shards are in their order.
      shardings: leaf name -> sharding.
      shapes: of the leaves.
      hashes: of the shards, [devices, leaves].
      arrays: the leaves; None if only bits are compared.
    """

    mesh: Mesh
    shardings: Mapping[str, NamedSharding]
    shapes: Sequence[tuple[int, ...]]
    hashes: np.ndarray
    arrays: Sequence[jax.Array] | None

    def distances(self, other: "Results") -> np.ndarray:
        """||a - b|| / ||b|| of each shard, [devices, leaves]; 0 where bits are equal.

        Infinite where integers differ, or only one of two numbers is finite. Without
        arrays any difference is infinite.
        """
        differ = self.hashes != other.hashes
        found = np.where(differ, np.inf, 0.0)
        if self.arrays is None or other.arrays is None:
            return found
        for column in np.flatnonzero(differ.any(axis=0)).tolist():
            (near,) = moved([other.arrays[column]], self.mesh)
            spec = list(self.shardings.values())[column].spec
            measure = _distance(self.mesh, spec)
            own = np.asarray(jax.device_get(measure(self.arrays[column], near)))
            found[:, column] = np.where(differ[:, column], own, 0.0)
        return found

    def shard(self, column: int, place: int) -> str:
        """A shard's leaf and slice, as ``params/w[0:4, 0:2]``."""
        name, sharding = list(self.shardings.items())[column]
        device, shape = self.mesh.devices.flat[place], self.shapes[column]
        index = sharding.devices_indices_map(shape)[device]
        assert index is not None
        ends = [own.indices(size) for own, size in zip(index, shape, strict=True)]
        slices = ", ".join(f"{start}:{end}" for start, end, _ in ends)
        return f"{name}[{slices}]" if slices else name


def differences(one: Results, other: Results, tolerance: float) -> np.ndarray:
    """Whether the same shards of two results differ, [devices, leaves].

    Args:
      one: a result.
      other: another one of the same step.
      tolerance: as `Replays.tolerance`.
    """
    differ = one.hashes != other.hashes
    if not tolerance or not differ.any():
        return differ
    return one.distances(other) > tolerance


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Which run was wrong in a shard.

    Attributes:
      column: the leaf's number.
      place: the shard's number.
      run: its number; None if that is not known.
    """

    column: int
    place: int
    run: int | None


def judge(differ: Sequence[np.ndarray]) -> list[Verdict]:
    """Find out by the vote of three runs which one was wrong in each shard.

    Args:
      differ: of runs 0 and 1, 0 and 2, 1 and 2: whether shards differ, each [devices,
        leaves]; of runs 0 and 1 alone without a vote.

    Returns:
      A verdict for each shard in which runs differ, leaf by leaf.
    """
    pairs = np.stack(differ)
    # Which pairs differ -> the run that differs from both others, which agree.
    alone: dict[tuple[bool, ...], int]
    alone = {(True, True, False): 0, (True, False, True): 1, (False, True, True): 2}
    return [
        Verdict(column, place, alone.get(tuple(pairs[:, place, column].tolist())))
        for column, place in np.argwhere(pairs.any(axis=0).T).tolist()
    ]


def wrong_device(verdicts: Sequence[Verdict], meshes: Sequence[Mesh]) -> Any:
    """The one device that was wrong wherever runs differ; None if there is no such one.

    The owner of a shard is not to blame for what collectives bring it. But they bring
    the error of a gradient to others too, as the metrics show: its norm is among them.
    """
    found = {
        None if own.run is None else meshes[own.run].devices.flat[own.place]
        for own in verdicts
    }
    return found.pop() if len(found) == 1 else None


def describe(runs: Sequence[Results], tolerance: float) -> str:
    """Say where runs of a step differ, and which device was wrong.

    Args:
      runs: of the step, of its replay, and of a second one if there is one.
      tolerance: as `Replays.tolerance`.
    """
    pairs = [(0, 1), (0, 2), (1, 2)] if len(runs) > 2 else [(0, 1)]
    verdicts = judge([differences(runs[i], runs[j], tolerance) for i, j in pairs])
    meshes = [run.mesh for run in runs]
    shards = [
        f"{runs[0].shard(own.column, own.place)} by "
        + " and ".join(device_name(mesh.devices.flat[own.place]) for mesh in meshes[:2])
        for own in verdicts[:_NAMED]
    ]
    more = len(verdicts) - _NAMED
    rest = f"; and {more} more" if more > 0 else ""
    device = wrong_device(verdicts, meshes)
    blame = _not_known(verdicts, len(runs))
    if device is not None:
        blame = (
            f"By the vote of {len(runs)} runs {device_name(device)} is wrong: take it "
            "out of service, and resume from a checkpoint of a step before."
        )
    return (
        f"the step and its replay on shifted devices differ: {'; '.join(shards)}{rest}."
        f" {blame}"
    )


def _not_known(verdicts: Sequence[Verdict], num_runs: int) -> str:
    found = {own.run for own in verdicts}
    why = "collectives have spread the error"
    if num_runs < 3:
        why = "two devices have no third one to decide between them"
    elif found == {0}:
        why += ", and both replays agree: the step was wrong, once"
    elif None not in found and 0 not in found:
        why += ", and the step agrees with one replay: the other one was wrong, once"
    else:
        why += ", in more than one run: a device is often wrong"
    return (
        f"Which device is wrong is not known ({why}). Test those of this mesh "
        "(NVIDIA's with dcgmi diag -r 3), take the one that fails out of service, and "
        "resume from a checkpoint of a step before."
    )


@functools.cache
def _distance(mesh: Mesh, spec: P) -> jax.stages.Wrapped:
    """A function of two leaves: the distance of each device's shards, [devices]."""

    def body(one: jax.Array, other: jax.Array) -> jax.Array:
        return jax.lax.all_gather(_relative(one, other), mesh.axis_names)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(spec, spec), out_specs=P(), check_vma=False
    )

    def measure(one: jax.Array, other: jax.Array) -> jax.Array:
        return mapped(*map(to_stored, to_device([one, other])))

    return jax.jit(measure, out_shardings=NamedSharding(mesh, P()))


def _relative(one: jax.Array, other: jax.Array) -> jax.Array:
    """||one - other|| / ||other||; infinite for integers that differ, and for NaN."""
    if not one.size:
        return jnp.float32(0)
    same = one == other
    if not jnp.issubdtype(one.dtype, jnp.inexact):
        return jnp.where(same.all(), jnp.float32(0), jnp.inf)
    same |= jnp.isnan(one) & jnp.isnan(other)
    wide = jnp.promote_types(one.dtype, jnp.float32)
    one, other = one.astype(wide), other.astype(wide)
    apart = jnp.where(same, 0.0, jnp.abs(one - other))
    size = jnp.where(jnp.isfinite(other), jnp.abs(other), 0.0)
    ratio = jnp.linalg.norm(apart.ravel()) / jnp.linalg.norm(size.ravel())
    return jnp.where(same.all(), 0.0, jnp.where(jnp.isnan(ratio), jnp.inf, ratio))
