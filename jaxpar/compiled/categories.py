"""What are a program's kernels for, and what does each kind of them move?

Read from the structure of a scheduled GPU program and from jax's names in it. A kernel
that is not a matmul and has none of the marks below is "norms and the rest".
"""

import collections
import dataclasses
import re
from collections.abc import Mapping

from jaxpar.compiled.hlo import Computation, Instruction, Module, runs_of
from jaxpar.compiled.memory_traffic import moved_bytes

COLLECTIVES, ATTENTION, CALLS = "collectives", "attention", "other calls"
TRUNK, LOGITS = "matmuls", "matmuls of logits"
LOSS, OPTIMIZER, ACTIVATIONS = "cross entropy", "optimizer", "activations"
TRANSPOSES, COPIES, REST = "transposes", "casts and copies", "norms and the rest"

_VIEWS = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "reshape"}
_MOVES = _VIEWS | {
    *("slice", "dynamic-slice", "dynamic-update-slice", "convert", "copy"),
    *("bitcast-convert", "transpose", "broadcast", "concatenate", "pad", "iota"),
}
_ACTIVATIONS = {"tanh", "erf", "logistic", "exponential"}
_PRODUCTS = {"dot", "convolution"}
_COLLECTIVE = re.compile("all-|ragged-all|reduce-scatter|collective-|send|recv")
_ATTENTION = re.compile("attention|fmha|flash", re.IGNORECASE)
_GEMM = re.compile("gemm|matmul|cublas", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Moved:
    """What the kernels of a category do in one run of the program.

    Attributes:
      launches: of kernels in the entry computation.
      in_loops: of kernels in loops and branches, such as a loop over chunks of logits.
      bytes: read and written by all of them.
    """

    launches: int = 0
    in_loops: int = 0
    bytes: int = 0

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(
            self.launches + other.launches,
            self.in_loops + other.in_loops,
            self.bytes + other.bytes,
        )


def moved_by_category(module: Module, vocabulary: int) -> dict[str, Moved]:
    """Sum launches and bytes by what kernels are for.

    Args:
      module: a scheduled GPU program.
      vocabulary: size of the logits' last dim.

    Returns:
      Category -> launches and bytes of one run; most bytes first.
    """
    runs, _ = runs_of(module)
    around = {
        instruction.name: computation
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
    }
    found: dict[str, Moved] = collections.defaultdict(Moved)
    for kernel, moved in moved_bytes(module):
        computation = around[kernel.name]
        times = runs[computation.name]
        in_loop = times if computation.name != module.entry.name else 0
        category = category_of(kernel, computation, module, vocabulary)
        found[category] += Moved(times - in_loop, in_loop, moved)
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes))


def total(by_category: Mapping[str, Moved]) -> Moved:
    """The sum over all categories."""
    return sum(by_category.values(), Moved())


def category_of(
    kernel: Instruction, around: Computation, module: Module, vocabulary: int
) -> str:
    """What a kernel is for: the first of the rules that fits."""
    if _COLLECTIVE.match(kernel.opcode):
        return COLLECTIVES
    operands = [around.instructions[name] for name in kernel.operands]
    dims = [a.dims for each in (kernel, *operands) for a in each.types if a.dims]
    inner = _opcodes(kernel, module)
    target = kernel.attribute("custom_call_target")
    if target and not _GEMM.search(target):
        return ATTENTION if _ATTENTION.search(target) else CALLS
    if target or inner & _PRODUCTS:
        return LOGITS if any(vocabulary in each for each in dims) else TRUNK
    if inner <= _MOVES:
        return TRANSPOSES if "transpose" in inner else COPIES
    if "/update/" in kernel.op_name:
        return OPTIMIZER
    if any(len(each) > 1 and each[-1] == vocabulary for each in dims):
        return LOSS
    return ACTIVATIONS if inner & _ACTIVATIONS else REST


def _opcodes(kernel: Instruction, module: Module) -> set[str]:
    """Opcodes on arrays in a kernel, those of fusions in it too."""
    if kernel.opcode not in ("fusion", "call"):
        return {kernel.opcode.removesuffix("-start")}
    found: set[str] = set()
    for inner in module.computations[kernel.called[0]].instructions.values():
        if any(array.dims for array in inner.types):
            found |= _opcodes(inner, module)
    return found
