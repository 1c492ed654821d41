"""What does each module of a model cost in a step: FLOPs, bytes and time?"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from jaxpar.compiled.hlo import Module, parse
from jaxpar.compiled.memory_traffic import moved_bytes
from jaxpar.compiled.modules import (
    OUTSIDE,
    Attribution,
    ModuleTree,
    Path,
    attributions_of,
    inclusive,
    make_tree,
)
from jaxpar.engine.compiled_step import CompiledStep
from jaxpar.jaxprs.evaluate import flops_by_scope
from jaxpar.model.blocks import PipelineModel
from jaxpar.model.bridge import UnderAxisRules
from jaxpar.step.train_step import UPDATE_SCOPE

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """A module, or layers of the same structure, with all that is below.

    Attributes:
      path: in the table, such as ("Block_*", "Dense_0"); or what has no module.
      count: modules that the row stands for.
      parameters: of all of them.
      flops: of a step's matmuls and convolutions on all devices, with what is
        recomputed in the backward pass.
      bytes: that the program's instructions read from memory and write to it, on one
        device, in a step.
      seconds: of a step, on one device; None if it was not measured.
    """

    path: Path
    count: int
    parameters: int
    flops: int
    bytes: int
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class StepModules:
    """The programs of a step, and where their instructions belong.

    Attributes:
      tree: the modules.
      attributions: name of a program -> name of an instruction -> where it belongs.
      flops: path in the table -> as in `ModuleRow`, without what is below.
      bytes: likewise.
    """

    tree: ModuleTree
    attributions: Mapping[str, Mapping[str, Attribution]]
    flops: Mapping[Path, int]
    bytes: Mapping[Path, int]

    def attribution(self, program: str, op: str) -> Attribution | None:
        """Where an instruction belongs; None if no program of the step has it."""
        return self.attributions.get(program, {}).get(op)

    def rows(self, seconds: Mapping[Path, float] | None = None) -> list[ModuleRow]:
        """The table.

        Args:
          seconds: path in the table -> seconds of a step; None if not measured.

        Returns:
          Modules, each followed by those below it, then what belongs to no module.
        """
        parameters = inclusive(self.tree.parameters)
        flops, moved = inclusive(self.flops), inclusive(self.bytes)
        times = None if seconds is None else inclusive(seconds)
        found = flops.keys() | moved.keys() | (times or {}).keys()
        return [
            ModuleRow(
                path,
                self.tree.counts.get(path, 1),
                int(parameters.get(path, 0)),
                int(flops.get(path, 0)),
                int(moved.get(path, 0)),
                None if times is None else float(times.get(path, 0)),
            )
            for path in [*self.tree.counts, *(p for p in OUTSIDE if p in found)]
        ]


def read_modules(engine: CompiledStep) -> StepModules:
    """Read a step's programs; compiles them if they are not yet.

    Args:
      engine: the engine, or one of its losses.
    """
    model = engine.arguments["model"]
    model = model.model if isinstance(model, UnderAxisRules) else model
    stacked = model.counts if isinstance(model, PipelineModel) else {}
    leaves = engine.placement.leaves
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    tree = make_tree(shapes, stacked, UPDATE_SCOPE)
    flops: dict[Path, int] = {}
    for traced in engine.traces().values():
        for scope, number in flops_by_scope(traced.jaxpr.jaxpr.eqns).items():
            _add(flops, tree.find(f"{scope}/matmul"), number)
    moved: dict[Path, int] = {}
    attributions: dict[str, dict[str, Attribution]] = {}
    for lowered in engine.lowered().values():
        text = lowered.compile().as_text() or ""
        module = parse(text, engine.spec.execution.active_fraction)
        own = attributions[_name(text)] = attributions_of(module, text, tree)
        _add_moved(moved, module, own)
    return StepModules(tree, attributions, flops, moved)


def _add_moved(
    found: dict[Path, int], module: Module, attributions: Mapping[str, Attribution]
) -> None:
    for instruction, number in moved_bytes(module):
        _add(found, attributions[instruction.name].path, number)


def _add(found: dict[Path, int], path: Path, number: int) -> None:
    found[path] = found.get(path, 0) + number


def _name(text: str) -> str:
    """The name of a program: ``HloModule jit_step, ...``."""
    return text.partition(" ")[2].partition(",")[0]


def as_table(
    rows: Sequence[ModuleRow], idle: float | None = None, *, depth: int = 3
) -> Table:
    """Render the rows.

    Args:
      rows: of `StepModules.rows`; a module's numbers have those of the modules below.
      idle: seconds of a step in which a device ran nothing; None if not measured.
      depth: how many levels of modules to show; numbers in a list are no level.
    """
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("module")
    for name in ("parameters", "FLOPs", "bytes"):
        table.add_column(name, justify="right")
    tops = [row for row in rows if len(row.path) == 1]
    whole = sum(row.seconds or 0.0 for row in tops) + (idle or 0.0)
    if idle is not None:
        table.add_column("ms", justify="right")
        table.add_column("% of time", justify="right")

    def times(seconds: float | None) -> list[str]:
        if idle is None or seconds is None:
            return []
        return [f"{1e3 * seconds:.2f}", f"{100 * seconds / (whole or 1.0):.1f}"]

    for row in rows:
        if sum(part.strip("*0123456789") != "" for part in row.path) <= depth:
            name = "  " * (len(row.path) - 1) + row.path[-1]
            name += f" x {row.count}" if row.count > 1 else ""
            numbers = _short(row.parameters), _short(row.flops), _short(row.bytes)
            table.add_row(name, *numbers, *times(row.seconds))
    if idle is not None:
        table.add_row("(nothing ran)", "", "", "", *times(idle))
    sums = [sum(getattr(r, n) for r in tops) for n in ("parameters", "flops", "bytes")]
    table.add_row("all", *map(_short, sums), *times(whole))
    return table


def as_json(rows: Sequence[ModuleRow]) -> list[dict[str, Any]]:
    """The rows as JSON values."""
    return [{**dataclasses.asdict(row), "path": "/".join(row.path)} for row in rows]


def _short(number: int) -> str:
    """A number in three digits: 12.3 G; empty for 0."""
    for size, unit in _UNITS:
        if number >= size:
            digits = 3 - len(str(int(number / size)))
            return f"{number / size:.{max(digits, 0)}f} {unit}"
    return str(number) if number else ""
