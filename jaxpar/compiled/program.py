"""What does a compiled step cost: the memory and traffic that the compiler decided."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from jaxpar.compiled.collectives import Collective, read_collectives
from jaxpar.compiled.hlo import Module, parse


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
      parameters: argument name, as traced, -> bytes on one device, padding included.
      collectives: its collectives, most bytes first.
      unknown_loops: loops whose trip count the program does not say; their contents are
        counted once.
    """

    memory: Memory
    parameters: Mapping[str, int]
    collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...]

    def bytes_of(self, argument: str) -> int:
        """Bytes of one argument of the traced function, all its leaves together.

        Args:
          argument: the name of the function's parameter.

        Returns:
          Bytes on one device, padding included.
        """
        pattern = re.compile(rf"{re.escape(argument)}(?![\w])")
        return sum(n for name, n in self.parameters.items() if pattern.match(name))

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


def read_program(
    compiled: Any, mesh: Mesh, module: Module | None = None
) -> CompiledProgram:
    """Read a compiled program.

    Args:
      compiled: a `jax.stages.Compiled`, for any backend, present or not.
      mesh: the mesh that it was traced for.
      module: its parsed text, if that exists already.

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
    collectives, unknown = read_collectives(module, dict(mesh.shape))
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    return CompiledProgram(
        memory=_memory(compiled.memory_analysis(), on_gpu=on_gpu),
        parameters=_parameters(module),
        collectives=collectives,
        unknown_loops=unknown,
    )


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
        # XLA:CPU's own figure leaves temporaries out (jax 0.10.2 to 0.12.0.1), and
        # libtpu rejects programs by the sum of their temporaries, not by their peak.
        peak=stats.peak_memory_in_bytes if on_gpu else total,
        on_host=on_host,
    )


def _parameters(module: Module) -> dict[str, int]:
    """Entry parameters carry the names of the traced function's arguments."""
    sizes: dict[str, int] = {}
    for instruction in module.entry.instructions.values():
        if instruction.opcode == "parameter":
            name = instruction.op_name or instruction.name
            padded = sum(array.padded_bytes for array in instruction.types)
            sizes[name] = sizes.get(name, 0) + padded
    return sizes
