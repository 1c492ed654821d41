"""What does each kernel of a program read from memory and write to it?

Between kernels: what each fusion, matmul, copy or collective reads and writes. A slice
of an array counts as the slice, and so does an update in place.
"""

import math
from collections.abc import Iterator

from jaxpar.compiled.hlo import Computation, Instruction, Module, runs_of

_FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
        *("while", "conditional", "call", "after-all", "add-dependency"),
        *("opt-barrier", "partition-id", "replica-id", "domain"),
        "async-update",
    }
)
"""Opcodes that move no bytes: names and control."""

_FUSIONS = ("fusion", "fusion-start")
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "copy", "convert", "reshape")


def moved_bytes(module: Module) -> Iterator[tuple[Instruction, int]]:
    """Count what the instructions of a program move, on one device.

    Args:
      module: the program.

    Yields:
      (an instruction that is a kernel, bytes over all its runs in a run of the
      program).
    """
    inside = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode not in ("while", "conditional", "call")
        for name in instruction.called
    }
    runs, _ = runs_of(module)
    for name, times in runs.items():
        if name in inside:
            continue
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            if not is_free(instruction):
                yield (
                    instruction,
                    times * kernel_bytes(instruction, computation, module),
                )


def is_free(instruction: Instruction) -> bool:
    """Whether an instruction moves nothing, or was counted at its start."""
    return instruction.opcode in _FREE or instruction.opcode.endswith("-done")


def kernel_bytes(instruction: Instruction, around: Computation, module: Module) -> int:
    """Count what one run of a kernel reads and writes.

    Args:
      instruction: the kernel.
      around: the computation that contains it.
      module: the program.

    Returns:
      Bytes.
    """
    sizes = [
        sum(array.bytes for array in around.instructions[name].types)
        for name in instruction.operands
    ]
    written = sum(array.bytes for array in instruction.types)
    if instruction.opcode == "async-start":
        inner = module.computations[instruction.called[0]]
        return kernel_bytes(inner.root, inner, module)
    if instruction.opcode in _FUSIONS:
        return _fusion_bytes(module.computations[instruction.called[0]], sizes)
    if instruction.opcode.endswith("-start"):
        return written  # The operands are listed with the results.
    if instruction.opcode in _SLICES:
        return 2 * written
    if instruction.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    return sum(sizes) + written


def _fusion_bytes(fused: Computation, sizes: list[int]) -> int:
    """Bytes: slices of operands only sliced, and updates of results in place."""
    updated: set[str] = set()
    written = sum(array.bytes for array in fused.root.types)
    for instruction in fused.instructions.values():
        if instruction.opcode == "dynamic-update-slice":
            array, update = instruction.operands[:2]
            updated.add(_behind_views(fused, array))
            whole = sum(a.bytes for a in instruction.types)
            part = sum(a.bytes for a in fused.instructions[update].types)
            written += part - whole
    read = 0
    for instruction in fused.instructions.values():
        if instruction.opcode != "parameter":
            continue
        whole = sizes[int(instruction.literal)]
        sliced = _sliced_elements(fused, instruction.name)
        if sliced is not None:
            elements = sum(math.prod(array.dims) for array in instruction.types)
            read += whole * sliced // max(elements, 1)
        elif instruction.name not in updated:
            read += whole
    return read + max(written, 0)


def _sliced_elements(fused: Computation, name: str) -> int | None:
    """Elements of an array that is only sliced, also once it was cast; else None."""
    users = [each for each in fused.instructions.values() if name in each.operands]
    total = 0
    for user in users:
        if user.opcode in _SLICES and user.operands[0] == name:
            total += sum(math.prod(array.dims) for array in user.types)
            continue
        inner = _sliced_elements(fused, user.name) if user.opcode in _VIEWS else None
        if inner is None:
            return None
        total += inner
    return total if users else None


def _behind_views(computation: Computation, name: str) -> str:
    """The name of the array behind a chain of views."""
    instruction = computation.instructions[name]
    while instruction.opcode in _VIEWS:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction.name
