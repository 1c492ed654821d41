"""How long should a kernel of a scheduled GPU program take: a roofline.

The longer of its bytes over the memory's rate and its FLOPs over the matmul rate. FLOPs
are those of matmuls, and what a custom call says of itself (``flops = N``); kernels
that say nothing, as Pallas's, count by their bytes alone, which is too short.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from jaxpar.compiled.hardware import Hardware
from jaxpar.compiled.hlo import Computation, Instruction, Module
from jaxpar.compiled.memory_traffic import kernel_bytes

_STATED = re.compile(r"\bflops = (\d+)")
_CONTRACTED = re.compile(r'lhs_contracting_dim\w+"?[=:][{\[]([^}\]]*)')
_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a device reaches.

    Attributes:
      memory: bytes per second, reads and writes.
      matmuls: dtype -> FLOP/s of large matmuls.
      attention: FLOP/s of calls that state their own FLOPs.
      launch: seconds that each kernel takes besides.
    """

    memory: float
    matmuls: Mapping[str, float]
    attention: float
    launch: float = 0.0


def rates_of(hardware: Hardware) -> Rates:
    """The rates of a kind of device, times the fraction that programs reach."""
    matmuls = {
        dtype: peak * hardware.peak_achieved for dtype, peak in hardware.peak.items()
    }
    return Rates(
        memory=hardware.memory_rate * hardware.memory_achieved,
        matmuls=matmuls,
        attention=matmuls["bfloat16"],
    )


def kernel_seconds(
    kernel: Instruction, around: Computation, module: Module, rates: Rates
) -> float:
    """Estimate one run of one kernel.

    Args:
      kernel: an instruction that is a kernel.
      around: the computation that contains it.
      module: the program.
      rates: of the device.

    Returns:
      Seconds.
    """
    moving = kernel_bytes(kernel, around, module) / rates.memory
    stated = _STATED.search(kernel.attributes)
    if stated:
        return max(moving, int(stated.group(1)) / rates.attention) + rates.launch
    flops = matmul_flops(kernel, around, module)
    multiplying = sum(
        number / rates.matmuls.get(_NAMES.get(dtype, ""), rates.matmuls["bfloat16"])
        for dtype, number in flops.items()
    )
    return max(moving, multiplying) + rates.launch


def matmul_flops(
    kernel: Instruction, around: Computation, module: Module
) -> dict[str, int]:
    """Count the FLOPs of a matmul, or of the matmuls in a fusion, by their dtype."""
    if kernel.opcode in ("fusion", "fusion-start", "call"):
        found: dict[str, int] = {}
        fused = module.computations[kernel.called[0]]
        for inner in fused.instructions.values():
            for dtype, number in matmul_flops(inner, fused, module).items():
                found[dtype] = found.get(dtype, 0) + number
        return found
    if kernel.opcode not in ("dot", "custom-call"):
        return {}
    contracted = _CONTRACTED.search(kernel.attributes)
    if not contracted:
        return {}
    left = around.instructions[kernel.operands[0]].types[0]
    depth = math.prod(left.dims[int(d)] for d in re.findall(r"\d+", contracted[1]))
    return {left.dtype: 2 * math.prod(kernel.types[0].dims) * depth}
