"""What is one device's work in a step: bytes through memory, bytes over links.

Read from the compiled program. Memory traffic is counted between kernels: what each
fusion, matmul, copy or collective reads and writes, in every run.
"""

import dataclasses
from collections.abc import Mapping

from jaxpar.compiled.collectives import Collective
from jaxpar.compiled.hlo import Instruction, Module
from jaxpar.compiled.link_rates import spans_hosts
from jaxpar.compiled.memory_traffic import moved_bytes

_PRODUCTS = ("dot", "convolution")


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

    Args:
      module: the program.

    Returns:
      Bytes of one run.
    """
    moved = {True: 0, False: 0}
    for instruction, number in moved_bytes(module):
        beside = instruction.opcode in ("fusion-start", "async-start")
        moved[beside or _multiplies(instruction, module)] += number
    return Traffic(products=moved[True], others=moved[False])


def _multiplies(instruction: Instruction, module: Module) -> bool:
    """Whether a kernel contains a matmul."""
    if instruction.opcode == "custom-call":
        called = instruction.attribute("custom_call_target").lower()
        return any(word in called for word in ("gemm", "matmul", "conv", "attention"))
    if instruction.opcode == "fusion":
        fused = module.computations[instruction.called[0]].instructions.values()
        return any(inner.opcode in _PRODUCTS for inner in fused)
    return instruction.opcode in _PRODUCTS


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
