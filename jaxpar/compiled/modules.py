"""Which module of the model does an instruction of the program belong to?

The compiler keeps jax's name of an operation, with the scopes that it was traced in:
``jit(flat_step)/transpose(jvp(blocks))/mlp/up/dot_general``. A module is found by
following those scopes down the tree of the parameters' names; other scopes, such as
those of transformations, loops and users, are passed over.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from jaxpar.compiled.collectives import KINDS
from jaxpar.compiled.hlo import Instruction, Module
from jaxpar.compiled.source_lines import line_of, read_stacks

Path = tuple[str, ...]

UPDATE: Path = ("(update)",)
LOSS: Path = ("(loss function)",)
COLLECTIVES: Path = ("(collectives)",)
OTHER: Path = ("(other)",)
OUTSIDE = (LOSS, UPDATE, COLLECTIVES, OTHER)
"""The rows of what belongs to no module: traced with a gradient, but in no module's
call; traced in the update; collectives, such as those that the compiler combined from
several modules'; the rest."""

_CONTROL = ("while", "conditional", "call")
_GRADIENT = {"jvp", "transpose"}


@dataclasses.dataclass(frozen=True)
class ModuleTree:
    """The modules of a model that have parameters; equal layers are one.

    Attributes:
      folded: path of a module -> path in the table, such as ("Block_*", "Dense_0").
      counts: path in the table -> modules that it stands for.
      parameters: path in the table -> parameters of the modules themselves, without
        those of modules below.
      update_scope: the named scope of the optimizer's update.
    """

    folded: Mapping[Path, Path]
    counts: Mapping[Path, int]
    parameters: Mapping[Path, int]
    update_scope: str

    def find(self, op_name: str) -> Path:
        """The path in the table of an operation, or one of `OUTSIDE`.

        Args:
          op_name: jax's name of the operation.
        """
        *scopes, _ = [part for part in re.split(r"[/()]", op_name) if part] or [""]
        at: Path = ()
        for scope in scopes:
            # Linen: "encoder.encode" is a method of the module "encoder".
            below = (*at, scope.partition(".")[0])
            at = below if below in self.folded else at
        if at:
            return self.folded[at]
        if self.update_scope in scopes:
            return UPDATE
        return LOSS if _GRADIENT & set(scopes) else OTHER


@dataclasses.dataclass(frozen=True)
class Attribution:
    """Which module an instruction belongs to.

    Attributes:
      path: the module's path in the table, or one of `OUTSIDE`.
      communicates: whether it is a collective.
      is_control: whether it only runs other instructions, which are placed themselves.
      source: for what belongs to no module, jax's name of it, and "file:line" where it
        was traced; empty if the program does not say.
    """

    path: Path
    communicates: bool
    is_control: bool
    source: str


def make_tree(
    shapes: Mapping[str, tuple[int, ...]],
    stacked: Mapping[str, int],
    update_scope: str,
) -> ModuleTree:
    """Find the modules, and fold layers of the same structure.

    Siblings are folded if their names differ in a number alone, and the names and
    shapes of the parameters below are equal.

    Args:
      shapes: name of a parameter, "blocks/mlp/up/kernel" -> its shape.
      stacked: name of a section -> its blocks, which are stacked in its parameters.
      update_scope: as in `ModuleTree`.

    Example:
      >>> shapes = {f"Block_{i}/kernel": (2, 2) for i in range(3)}
      >>> tree = make_tree(shapes, {}, "update")
      >>> tree.counts, tree.parameters
      ({('Block_*',): 3}, {('Block_*',): 12})
    """
    leaves = {tuple(name.split("/")): shape for name, shape in shapes.items()}
    folded: dict[Path, Path] = {(): ()}
    _fold(leaves, (), (), folded)
    counts: dict[Path, int] = collections.Counter()
    for path, row in folded.items():
        counts[row] += stacked.get(path[0], 1) if path else 1
    parameters: dict[Path, int] = collections.Counter()
    for path, shape in leaves.items():
        parameters[folded[path[:-1]]] += math.prod(shape)
    del folded[()], counts[()]
    own = {path: number for path, number in parameters.items() if path}
    return ModuleTree(folded, dict(counts), own, update_scope)


def _fold(
    leaves: Mapping[Path, tuple[int, ...]], at: Path, to: Path, folded: dict[Path, Path]
) -> None:
    """Add the modules below `at`, whose path in the table is `to`."""
    below: dict[str, dict[Path, tuple[int, ...]]] = {}
    for path, shape in leaves.items():
        if len(path) > 1:
            below.setdefault(path[0], {})[path[1:]] = shape
    alike: dict[tuple, list[str]] = {}
    for name, own in below.items():
        key = re.sub(r"\d+", "*", name), tuple(sorted(own.items()))
        alike.setdefault(key, []).append(name)
    patterns = collections.Counter(pattern for pattern, _ in alike)
    for (pattern, _), names in alike.items():
        # Two structures under one pattern: each is called by its first.
        is_clear = len(names) > 1 and patterns[pattern] == 1
        row = (*to, pattern if is_clear else names[0])
        for name in names:
            folded[(*at, name)] = row
            _fold(below[name], (*at, name), row, folded)


def attributions_of(
    module: Module, text: str, tree: ModuleTree
) -> dict[str, Attribution]:
    """Attribute the instructions of a program to modules.

    A fusion without a module of its own belongs to the module of most instructions in
    it.

    Args:
      module: the program, parsed.
      text: the HLO text of `module`.
      tree: the modules.

    Returns:
      Name of an instruction -> its attribution.
    """
    stacks = read_stacks(text)
    found = {}
    for computation in module.computations.values():
        for name, instruction in computation.instructions.items():
            inner = [
                each
                for called in instruction.called
                if called in module.computations
                for each in module.computations[called].instructions.values()
            ]
            is_control = instruction.opcode in _CONTROL
            path = _path(instruction, [] if is_control else inner, tree)
            source = ""
            if path in OUTSIDE and instruction.op_name:
                line = line_of(instruction, stacks)
                source = f"{instruction.op_name} at {line}"
            communicates = any(map(_communicates, [instruction, *inner]))
            path = COLLECTIVES if communicates and path in OUTSIDE else path
            found[name] = Attribution(path, communicates, is_control, source)
    return found


def _path(
    instruction: Instruction, inner: Iterable[Instruction], tree: ModuleTree
) -> Path:
    own = tree.find(instruction.op_name)
    if own not in OUTSIDE:
        return own
    votes = collections.Counter(tree.find(each.op_name) for each in inner)
    within = {path: number for path, number in votes.items() if path not in OUTSIDE}
    return max(within, key=within.__getitem__) if within else own


def _communicates(instruction: Instruction) -> bool:
    return instruction.opcode.removesuffix("-start").removesuffix("-done") in KINDS


def is_collective_kernel(name: str) -> bool:
    """Whether a kernel's own name is that of a collective, as NCCL's are."""
    return "nccl" in name.lower() or name.startswith(KINDS)


def inclusive(own: Mapping[Path, int | float]) -> dict[Path, int | float]:
    """Add to each module what is below it."""
    found: dict[Path, int | float] = collections.defaultdict(int)
    for path, number in own.items():
        for depth in range(1, len(path) + 1):
            found[path[:depth]] += number
    return dict(found)
