"""Which instructions of a program copy between a device and its host, and how much?"""

from jaxpar.compiled.collectives import Site
from jaxpar.compiled.hlo import ArrayType, Computation, Instruction, Module, runs_of
from jaxpar.compiled.link_rates import TO_DEVICE, TO_HOST

_COPIES = ("copy", "fusion", "dynamic-slice", "dynamic-update-slice", "async")


def find_host_copies(module: Module) -> list[Site]:
    """Find every copy between a device's memory and the host's that runs.

    Args:
      module: the program.

    Returns:
      The instructions that copy, or start to, of kind "copy" over `TO_DEVICE` or
      `TO_HOST`. An update of a part of an array moves that part.
    """
    sites, wrapped = [], _wrapped(module)
    for name, times in runs_of(module)[0].items():
        if name in wrapped or not times:
            continue
        around = module.computations[name]
        for instruction in around.instructions.values():
            found = _copied(instruction, around)
            if found is not None:
                over, number = found
                sites.append(Site(instruction, "copy", over, 1, times, {"": number}))
    return sites


def _wrapped(module: Module) -> set[str]:
    """Computations of one kernel each, whose copies are those of the kernel."""
    return {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode.startswith(("fusion", "async"))
        for name in instruction.called
    }


def _copied(
    instruction: Instruction, around: Computation
) -> tuple[tuple[str, ...], int] | None:
    """The direction of a copy, and its bytes; None for another instruction."""
    opcode = instruction.opcode
    if opcode.removesuffix("-start") not in _COPIES:
        return None
    arrays = list(instruction.types)
    if not opcode.endswith("-start"):  # A start lists its operands with its results.
        operands = (around.instructions[name].types for name in instruction.operands)
        arrays = [array for types in operands for array in types] + arrays
    arrays = [array for array in arrays if array.dims]
    here = [array for array in arrays if not array.is_on_host]
    if not here or len(here) == len(arrays):
        return None
    made: ArrayType = arrays[0] if opcode == "copy-start" else arrays[-1]
    over = TO_HOST if made.is_on_host else TO_DEVICE
    return over, sum(array.bytes for array in here)
