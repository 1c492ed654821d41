"""What is one device's work in a step: bytes through memory, bytes over links.

Read from the compiled program. Memory traffic is counted between kernels: what each
fusion, matmul, copy or collective reads and writes, in every run.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxpar.compiled.collectives import Collective
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


_PRODUCTS = ("dot", "convolution")
_FUSIONS = ("fusion", "fusion-start")
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Links:
    """Bytes that one device sends in a step, by the slowest link of each collective.

    Attributes:
      inside_host: to devices of its own host.
      between_hosts: by groups that span hosts.
    """

    inside_host: int
    between_hosts: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one device reads from its memory and writes to it in a step.

    Attributes:
      products: by matmul kernels, and by copies that run beside them (XLA's
        asynchronous fusions).
      others: by all others.
    """

    products: int
    others: int


def memory_traffic(module: Module) -> Traffic:
    """Count what a program reads from memory and writes to it, on one device.

    A slice of an array counts as the slice, and so does an update in place.

    Args:
      module: the program.

    Returns:
      Bytes of one run.
    """
    inside = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode not in ("while", "conditional", "call")
        for name in instruction.called
    }
    runs, _ = runs_of(module)
    moved = {True: 0, False: 0}
    for name, times in runs.items():
        if name in inside:
            continue
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            if not _is_free(instruction):
                number = times * _moved(instruction, computation, module)
                beside = instruction.opcode in ("fusion-start", "async-start")
                moved[beside or _multiplies(instruction, module)] += number
    return Traffic(products=moved[True], others=moved[False])


def _is_free(instruction: Instruction) -> bool:
    """Whether an instruction moves nothing, or was counted at its start."""
    return instruction.opcode in _FREE or instruction.opcode.endswith("-done")


def _multiplies(instruction: Instruction, module: Module) -> bool:
    """Whether a kernel contains a matmul."""
    if instruction.opcode == "custom-call":
        called = instruction.attribute("custom_call_target").lower()
        return any(word in called for word in ("gemm", "matmul", "conv", "attention"))
    if instruction.opcode == "fusion":
        fused = module.computations[instruction.called[0]].instructions.values()
        return any(inner.opcode in _PRODUCTS for inner in fused)
    return instruction.opcode in _PRODUCTS


def _moved(instruction: Instruction, around: Computation, module: Module) -> int:
    """What one instruction reads and writes."""
    sizes = [
        sum(array.bytes for array in around.instructions[name].types)
        for name in instruction.operands
    ]
    written = sum(array.bytes for array in instruction.types)
    if instruction.opcode == "async-start":
        inner = module.computations[instruction.called[0]]
        return _moved(inner.root, inner, module)
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
        number = int(instruction.literal)
        users = [
            user
            for user in fused.instructions.values()
            if instruction.name in user.operands
        ]
        sliced = [
            user
            for user in users
            if user.opcode in _SLICES and user.operands[0] == instruction.name
        ]
        if users and len(sliced) == len(users):
            read += sum(a.bytes for user in sliced for a in user.types)
        elif instruction.name not in updated:
            read += sizes[number]
    return read + max(written, 0)


def _behind_views(computation: Computation, name: str) -> str:
    """The name of the array behind a chain of views."""
    instruction = computation.instructions[name]
    while instruction.opcode in ("bitcast", "copy", "convert", "reshape"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction.name


def link_bytes(
    collectives: tuple[Collective, ...],
    sizes: Mapping[str, int],
    devices_per_host: int,
) -> Links:
    """Split what a device sends by whether its groups span hosts.

    Args:
      collectives: the program's.
      sizes: mesh axis -> devices on it, in the mesh's order, numbered host by host.
      devices_per_host: devices on each host.

    Returns:
      Bytes by link.
    """
    sent = {False: 0, True: 0}
    for row in collectives:
        sent[spans_hosts(row.axes, sizes, devices_per_host)] += row.sent_bytes
    return Links(inside_host=sent[False], between_hosts=sent[True])


def spans_hosts(
    axes: tuple[str, ...], sizes: Mapping[str, int], devices_per_host: int
) -> bool:
    """Whether groups over these axes have devices of several hosts."""
    return members_per_host(axes, sizes, devices_per_host) < int(
        np.prod([sizes[axis] for axis in axes], initial=1)
    )


def members_per_host(
    axes: tuple[str, ...], sizes: Mapping[str, int], devices_per_host: int
) -> int:
    """How many devices of a group over these axes share a host."""
    numbers = np.arange(int(np.prod(list(sizes.values())))).reshape(*sizes.values())
    first = tuple(slice(None) if axis in axes else 0 for axis in sizes)
    hosts = numbers[first].reshape(-1) // devices_per_host
    return int(np.bincount(hosts - hosts.min()).max())
