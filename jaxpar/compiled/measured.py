"""What does a compiled step hold and communicate, and which operations cause it?"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping

import jax.numpy as jnp

from jaxpar.compiled.explain import Explanation, LeafReport
from jaxpar.compiled.exposed import Communication
from jaxpar.compiled.hlo import Module
from jaxpar.compiled.source_lines import Operation, read_operations

SMALL_BYTES = 1 << 16
"""Collectives of losses and norms move less."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a compiled step holds and communicates, and the causes.

    Attributes:
      mesh: axis -> devices.
      leaves: the train state's leaves, with their bytes in the program.
      operations: the collectives, most bytes first.
      peak_bytes: peak memory.
      on_cpu: whether XLA:CPU compiled the program.
      is_complete: whether every loop's trip count is known, so that all is counted.
      exposed_seconds: time that kernels wait for collectives; None where no schedule
        says it.
    """

    mesh: Mapping[str, int]
    leaves: tuple[LeafReport, ...]
    operations: tuple[Operation, ...]
    peak_bytes: int
    on_cpu: bool
    is_complete: bool = True
    exposed_seconds: float | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of the train state in the device's memory, without padding."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    @property
    def host_state_bytes(self) -> int:
        """Bytes of the train state in the host's memory, without padding."""
        return sum(leaf.host_bytes_per_device for leaf in self.leaves)

    @property
    def small_bytes(self) -> int:
        """Bytes that are ignored: 0.1 % of the parameters' bytes, or 64 KiB."""
        params = [leaf for leaf in self.leaves if leaf.name.startswith("params/")]
        return max(SMALL_BYTES, sum(map(whole_bytes, params)) // 1000)

    @property
    def communicated(self) -> dict[str, dict[str, int]]:
        """Axes -> kind -> bytes, as in `Budget`; most bytes first."""
        found: dict[str, dict[str, int]] = {}
        for operation in self.operations:
            if operation.axes:
                kinds = found.setdefault(" x ".join(operation.axes), {})
                total = kinds.get(operation.kind, 0) + operation.bytes
                kinds[operation.kind] = total
        return found


def measure(
    explanation: Explanation,
    module: Module,
    text: str,
    *,
    on_cpu: bool,
    communication: Communication | None = None,
) -> Measured:
    """Measure a compiled step.

    Args:
      explanation: of the step.
      module: its program, parsed; the state's leaves are ``state[0]``, ``state[1]`` and
        so on.
      text: the HLO text of `module`.
      on_cpu: whether XLA:CPU compiled it.
      communication: the time of its collectives, where its schedule says it.

    Returns:
      What it holds and communicates.
    """
    held: dict[bool, dict[str, int]] = {
        on_host: collections.defaultdict(int) for on_host in (False, True)
    }
    for instruction, on_host in module.parameters:
        held[on_host][instruction.op_name] += sum(a.bytes for a in instruction.types)
    names = {f"state[{i}]": leaf.name for i, leaf in enumerate(explanation.leaves)}
    return Measured(
        mesh=explanation.mesh,
        leaves=tuple(
            dataclasses.replace(
                leaf,
                bytes_per_device=held[False][argument],
                host_bytes_per_device=held[True][argument],
            )
            for argument, leaf in zip(names, explanation.leaves, strict=True)
        ),
        operations=tuple(
            # A collective of a stored leaf has the name of its argument.
            dataclasses.replace(found, name=names.get(found.name, found.name))
            for found in read_operations(module, text, explanation.mesh, communication)
        ),
        peak_bytes=explanation.program.memory.peak,
        on_cpu=on_cpu,
        is_complete=not explanation.program.unknown_loops,
        exposed_seconds=communication and communication.exposed_seconds,
    )


def join_measured(parts: Iterable[Measured]) -> Measured:
    """Join what the programs of one step hold and communicate.

    Args:
      parts: at least one; a leaf is held by those that take it.
    """
    first, *others = parts
    if not others:
        return first
    every = [first, *others]
    leaves = [
        max(same, key=lambda leaf: leaf.bytes_per_device + leaf.host_bytes_per_device)
        for same in zip(*(part.leaves for part in every), strict=True)
    ]
    operations = [operation for part in every for operation in part.operations]
    exposed = [part.exposed_seconds for part in every]
    known = [seconds for seconds in exposed if seconds is not None]
    return dataclasses.replace(
        first,
        leaves=tuple(leaves),
        operations=tuple(sorted(operations, key=lambda each: -each.bytes)),
        is_complete=all(part.is_complete for part in every),
        exposed_seconds=sum(known) if len(known) == len(every) else None,
    )


def whole_bytes(leaf: LeafReport) -> int:
    """Bytes of an unsharded leaf; jax's keys have no itemsize, and are small."""
    if leaf.dtype.startswith("key<"):
        return leaf.bytes_per_device
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
