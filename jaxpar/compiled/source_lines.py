"""Which line of the source does each collective of a program come from?

jax records in the program where every operation was traced: its name with the enclosing
scopes, and its call stack, in tables at the head of the text. The compiler gives a
collective the name and the stack of the operation that needed it.
"""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from jaxpar.compiled.collectives import find_sites
from jaxpar.compiled.exposed import Communication
from jaxpar.compiled.hlo import ArrayType, Instruction, Module

_PACKAGE = Path(__file__).resolve().parents[1]
_ENGINE = f"{_PACKAGE / 'engine'}{os.sep}"
_LIBRARIES = re.compile(
    r"[/\\](?:site|dist)-packages[/\\](?:jax|jaxlib|jaxtyping|beartype|flax|optax)[/\\]"
    r"|^<@beartype"
)
_FRAME_ID = re.compile(r"\bstack_frame_id=(\d+)")
_OLD_LINE = re.compile(r'\bsource_file="([^"]*)".*?\bsource_line=(\d+)')
_LONGEST_NAME = 90
_METADATA_IN_KEY = "jax_compilation_cache_include_metadata_in_key"


@dataclasses.dataclass(frozen=True)
class Operation:
    """One collective instruction, and where it comes from.

    Attributes:
      kind: such as "all-gather".
      axes: the mesh axes that its groups span.
      shape: of the largest unsharded array, such as "bf16[64,256,1024]".
      num_arrays: arrays communicated together.
      times: how often it runs per step.
      bytes: of the unsharded arrays, on one device, over all those runs.
      name: jax's name of the operation, with its scopes; empty where the compiler
        created the operation.
      line: "file:line" where the operation was traced; empty likewise.
      exposed_seconds: time that kernels wait for it in a step; 0 where no schedule says
        it.
    """

    kind: str
    axes: tuple[str, ...]
    shape: str
    num_arrays: int
    times: int
    bytes: int
    name: str
    line: str
    exposed_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.bytes:,} bytes: {self.described}"

    @property
    def described(self) -> str:
        """How often it runs, what it moves, and where it comes from."""
        more = f" and {self.num_arrays - 1} more" if self.num_arrays > 1 else ""
        # The end identifies the operation; the beginning is the step's own scopes.
        name = self.name or "an operation without a name"
        cut = "..." + name[-_LONGEST_NAME:] if len(name) > _LONGEST_NAME else name
        where = f" at {self.line}" if self.line else ""
        return f"{self.times} x {self.kind} of {self.shape}{more}, {cut}{where}"


@dataclasses.dataclass(frozen=True)
class Frame:
    """One call of a call stack.

    Attributes:
      file: the path, as Python knows it.
      line: the line.
    """

    file: str
    line: int


def read_operations(
    module: Module,
    text: str,
    sizes: Mapping[str, int],
    communication: Communication | None = None,
) -> tuple[Operation, ...]:
    """Find every collective of a program and the operation that it comes from.

    Args:
      module: the program, parsed.
      text: the HLO text of `module`.
      sizes: mesh axis -> devices on it, in the mesh's order.
      communication: the time of its collectives, where its schedule says it.

    Returns:
      The operations, most bytes first.
    """
    stacks = read_stacks(text)
    rows = communication.collectives if communication else ()
    exposed = {row.name: row.exposed_seconds for row in rows}
    found = []
    for site in find_sites(module, sizes)[0]:
        arrays = _whole(module, site.instruction)
        largest = max(arrays, key=lambda array: array.bytes)
        operation = Operation(
            kind=site.kind,
            axes=site.axes,
            shape=f"{largest.dtype}[{','.join(map(str, largest.dims))}]",
            num_arrays=len(arrays),
            times=site.times,
            bytes=site.times * site.bytes_over(sizes),
            name=site.instruction.op_name,
            line=line_of(site.instruction, stacks),
            exposed_seconds=exposed.get(site.instruction.name, 0.0),
        )
        found.append(operation)
    return tuple(sorted(found, key=lambda operation: -operation.bytes))


def read_stacks(text: str) -> Mapping[int, tuple[Frame, ...]]:
    """Read the tables of call stacks at the head of a program's text.

    Args:
      text: from ``Compiled.as_text()``.

    Returns:
      What the program calls ``stack_frame_id`` -> the calls, innermost first.
    """
    names = {int(n): name for n, name in _rows(text, "FileNames", r'"(.*)"')}
    places = {
        int(n): Frame(names[int(file)], int(line))
        for n, file, line in _rows(
            text, "FileLocations", r"\{file_name_id=(\d+).* line=(\d+) .*\}"
        )
    }
    frames = {
        # XLA prints a parent's number plus one: 1 means no parent.
        int(n): (places[int(place)], int(parent) - 1)
        for n, place, parent in _rows(
            text, "StackFrames", r"\{file_location_id=(\d+) parent_frame_id=(\d+)\}"
        )
    }

    @functools.cache
    def stack(number: int) -> tuple[Frame, ...]:
        place, parent = frames[number]
        # A parent precedes its children; without the check a cycle would not end.
        return (place, *(stack(parent) if 0 < parent < number else ()))

    return {number: stack(number) for number in sorted(frames)}


@contextlib.contextmanager
def todays_lines() -> Iterator[None]:
    """Compile so that the program's lines are those of the current source.

    Otherwise jax's compilation cache may return a program of the same operations, with
    the line numbers of an older source.
    """
    before = getattr(jax.config, _METADATA_IN_KEY)
    jax.config.update(_METADATA_IN_KEY, True)
    try:
        yield
    finally:
        jax.config.update(_METADATA_IN_KEY, before)


def _rows(text: str, table: str, pattern: str) -> list[tuple[str, ...]]:
    """The rows ``number pattern`` of one of the tables at the head."""
    start = re.search(rf"^{table}$", text, re.MULTILINE)
    if not start:
        return []
    body = text[start.end() :].lstrip("\n")
    body = body[: body.find("\n\n")]
    return re.findall(rf"^(\d+) {pattern}$", body, re.MULTILINE)


def _whole(module: Module, instruction: Instruction) -> list[ArrayType]:
    """The arrays that a collective assembles or takes, in their unsharded form."""
    table = next(
        computation.instructions
        for computation in module.computations.values()
        if computation.instructions.get(instruction.name) is instruction
    )
    taken = [array for name in instruction.operands for array in table[name].types]
    given = list(instruction.types)
    if instruction.opcode.endswith("-start"):
        # A -start returns its operands first, then its results.
        given = given[len(taken) : 2 * len(taken)] or given
    if len(given) != len(taken):
        return taken or given
    return [max(pair, key=lambda x: x.bytes) for pair in zip(taken, given, strict=True)]


def line_of(instruction: Instruction, stacks: Mapping[int, tuple[Frame, ...]]) -> str:
    """Where an instruction's operation was traced, as "file:line"; empty if unknown.

    Args:
      instruction: of the program.
      stacks: from `read_stacks`.
    """
    number = _FRAME_ID.search(instruction.attributes)
    if number:
        frame = _model_frame(stacks.get(int(number.group(1)), ()))
    else:
        old = _OLD_LINE.search(instruction.attributes)
        frame = Frame(old.group(1), int(old.group(2))) if old else None
    return f"{_relative(frame.file)}:{frame.line}" if frame else ""


def _model_frame(stack: tuple[Frame, ...]) -> Frame | None:
    """The innermost call in the model's or the loss function's code.

    If there is none, because the step itself does the operation: the innermost call.
    """
    for frame in stack:
        if frame.file.startswith(_ENGINE):
            break  # Frames outside the engine belong to the caller.
        if not _is_machinery(frame.file):
            return frame
    return next(iter(stack), None)


@functools.cache
def _is_machinery(file: str) -> bool:
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        return not path.is_relative_to(_PACKAGE / "models")
    return bool(_LIBRARIES.search(file))


def _relative(file: str) -> str:
    """The path relative to the working folder, if it is inside."""
    here = Path.cwd()
    return (
        str(Path(file).relative_to(here)) if Path(file).is_relative_to(here) else file
    )
