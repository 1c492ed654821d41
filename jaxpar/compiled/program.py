"""What does a compiled step cost: the memory and traffic that the compiler decided."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxpar.compiled.collectives import (
    Collective,
    find_sites,
    join_collectives,
    sum_sites,
)
from jaxpar.compiled.exposed import (
    Communication,
    join_communication,
    read_communication,
)
from jaxpar.compiled.hardware import Hardware, hardware_of
from jaxpar.compiled.hlo import Module, parse
from jaxpar.compiled.kernel_time import rates_of
from jaxpar.compiled.link_rates import count_per_host, link_rates_of
from jaxpar.compiled.update_traffic import is_in_update


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device while a program runs.

    Attributes:
      arguments: its inputs, padding included (TPUs pad to tiles).
      outputs: its results.
      aliased: outputs that reuse an argument's memory (donation).
      temporaries: all other memory at the peak.
      peak: peak memory.
      on_host: arguments, outputs and temporaries that live in the host's memory.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    on_host: int


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What was read from a compiled program.

    Attributes:
      memory: bytes on one device.
      parameters: argument name, as traced, -> bytes of one device's shard, padding
        included.
      collectives: its collectives, most bytes first.
      unknown_loops: loops whose trip count the program does not say; their contents are
        counted once.
      on_host: names of the arguments that are in the host's memory.
      parts: name -> program, of a step of several, which run one after the other; empty
        for one.
      communication: the time of its collectives, by its schedule; None where none can
        be read: of CPUs and TPUs, and of GPUs whose rates are unknown.
      of_update: those of `collectives` that the optimizer's update is for: what it
        communicates beyond gathers of parameters and reductions of gradients.
    """

    memory: Memory
    parameters: Mapping[str, int]
    collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...]
    on_host: tuple[str, ...] = ()
    parts: "Mapping[str, CompiledProgram]" = dataclasses.field(default_factory=dict)
    communication: Communication | None = None
    of_update: tuple[Collective, ...] = ()

    def bytes_of(self, argument: str) -> int:
        """Bytes of one argument of the traced function, all its leaves together.

        Args:
          argument: the name of the function's parameter.

        Returns:
          Bytes in one device's memory, padding included.
        """
        pattern = re.compile(rf"{re.escape(argument)}(?![\w])")
        return sum(
            number
            for name, number in self.parameters.items()
            if pattern.match(name) and name not in self.on_host
        )

    def communicated_bytes(self, kind: str, *axes: str) -> int:
        """Bytes of one kind of collective over exactly these axes (any if none).

        Args:
          kind: such as "all-gather".
          *axes: mesh axes.

        Returns:
          Bytes of the unsharded arrays, per device and step.
        """
        return sum(
            row.bytes
            for row in self.collectives
            if row.kind == kind and (not axes or set(row.axes) == set(axes))
        )


def join_programs(parts: Mapping[str, CompiledProgram]) -> CompiledProgram:
    """Join the programs of one step.

    Traffic is the sum. Memory is that of the part with the highest peak, to which the
    part of the state is added that is stored on the device and not an argument.

    Args:
      parts: name -> program; the state's leaves are their arguments ``state[0]`` and so
        on.

    Returns:
      The program, if there is one.
    """
    programs = list(parts.values())
    if len(programs) == 1:
        return programs[0]
    sizes = {name: n for part in programs for name, n in part.parameters.items()}
    on_host = {name: None for part in programs for name in part.on_host}

    def peak(part: CompiledProgram) -> int:
        return part.memory.peak + sum(
            number
            for name, number in sizes.items()
            if name.startswith("state[") and name not in {**part.parameters, **on_host}
        )

    largest = max(programs, key=peak)
    return CompiledProgram(
        memory=dataclasses.replace(largest.memory, peak=peak(largest)),
        parameters=sizes,
        collectives=join_collectives(part.collectives for part in programs),
        unknown_loops=tuple(
            f"{loop} of {name}"
            for name, part in parts.items()
            for loop in part.unknown_loops
        ),
        on_host=tuple(on_host),
        parts=parts,
        communication=_joined([part.communication for part in programs]),
        of_update=join_collectives(part.of_update for part in programs),
    )


def _joined(parts: Sequence[Communication | None]) -> Communication | None:
    known = [part for part in parts if part is not None]
    return join_communication(known) if len(known) == len(parts) else None


def read_program(
    compiled: Any,
    mesh: Mesh,
    module: Module | None = None,
    *,
    devices_per_host: int | None = None,
) -> CompiledProgram:
    """Read a compiled program.

    Args:
      compiled: a `jax.stages.Compiled`, for any backend, present or not.
      mesh: the mesh that it was traced for.
      module: its parsed text, if that exists already.
      devices_per_host: devices that share a host; None for what the mesh's devices say.

    Returns:
      Its costs on one device.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxpar.mesh import MeshShape, make_mesh
      >>> double = jax.jit(lambda x: 2 * x).lower(jnp.ones(4)).compile()
      >>> read_program(double, make_mesh(MeshShape())).bytes_of("x")
      16
    """
    module = module or parse(compiled.as_text())
    sites, unknown = find_sites(module, dict(mesh.shape))
    of_update = [site for site in sites if is_in_update(site.instruction.op_name)]
    arguments = _arguments(module)
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    return CompiledProgram(
        memory=_memory(compiled.memory_analysis(), on_gpu=on_gpu),
        parameters={name: number for name, (number, _) in arguments.items()},
        collectives=sum_sites(sites),
        unknown_loops=unknown,
        on_host=tuple(name for name, (_, is_off) in arguments.items() if is_off),
        communication=_communication(module, mesh, devices_per_host),
        of_update=sum_sites(of_update),
    )


def scheduled_hardware(mesh: Mesh) -> Hardware | None:
    """A mesh's devices, where programs for them have a schedule that can be timed.

    Those are GPUs of known rates. XLA:CPU has no asynchronous collectives, and a TPU's
    program hides them in fusions with parts of other kernels.
    """
    device = mesh.devices.flat[0]
    return hardware_of(device.device_kind) if device.platform == "gpu" else None


def _communication(
    module: Module, mesh: Mesh, devices_per_host: int | None
) -> Communication | None:
    """The time of a program's collectives, if it is for GPUs of known rates."""
    hardware = scheduled_hardware(mesh)
    if hardware is None:
        return None
    per_host = devices_per_host or count_per_host(mesh)
    links = link_rates_of(hardware, dict(mesh.shape), per_host)
    return read_communication(module, rates_of(hardware), links)


def _memory(stats: Any, *, on_gpu: bool) -> Memory:
    device = stats.argument_size_in_bytes + stats.output_size_in_bytes
    total = device - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    on_host = (
        stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes
    )
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        # XLA:GPU's peak has the host's bytes in it (jax 0.11.2, a program whose host
        # and device bytes are known).
        # XLA:CPU's own figure leaves temporaries out (jax 0.10.2 to 0.12.0.1), and
        # libtpu rejects programs by the sum of their temporaries, not by their peak.
        peak=stats.peak_memory_in_bytes - on_host if on_gpu else total,
        on_host=on_host,
    )


def _arguments(module: Module) -> dict[str, tuple[int, bool]]:
    """Argument name -> bytes, and whether it is in the host's memory."""
    found: dict[str, tuple[int, bool]] = {}
    for instruction, on_host in module.parameters:
        name = instruction.op_name or instruction.name
        padded = sum(array.padded_bytes for array in instruction.types)
        before, _ = found.get(name, (0, False))
        found[name] = before + padded, on_host
    return found
