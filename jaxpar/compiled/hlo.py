"""How is HLO text parsed: the computations of a compiled program.

The text is the one form that every backend gives (``Compiled.as_text()``). Operands are
printed without types, so each computation has a table of its names.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from jaxpar.jaxprs.branches import fractions_in, turns_in

_BITS = {
    "pred": 8,
    "s2": 2, "u2": 2, "s4": 4, "u4": 4,
    "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3b11fnuz": 8, "f8e4m3fn": 8,
    "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "token": 0, "opaque": 0,
}  # fmt: skip

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s([a-z][\w\-]*)\(")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_HOST = "S(5)"
_ARGUMENTS = re.compile(r"\bentry_computation_layout=\{\((.*?)\)->")
_CALLED = re.compile(
    r"\b(?:calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
    r"|\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """An array type of the program.

    Attributes:
      dtype: XLA's name, such as "bf16".
      dims: its shape.
      layout: the text in braces, such as "1,0:T(8,128)"; empty where not printed.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of its elements, without padding."""
        return -(-math.prod(self.dims) * _BITS[self.dtype] // 8)

    @property
    def is_on_host(self) -> bool:
        """Whether it is in the host's memory."""
        return _HOST in self.layout

    @property
    def padded_bytes(self) -> int:
        """Bytes in memory: TPUs pad the minor dims to tiles."""
        order, _, rest = self.layout.partition(":")
        tile = re.match(r"T\(([\d,]+)\)", rest)
        if not tile:
            return self.bytes
        minor_to_major = [int(d) for d in order.split(",") if d]
        physical = [self.dims[d] for d in reversed(minor_to_major)] or [1]
        sizes = [int(s) for s in tile.group(1).split(",")]
        physical = [1] * (len(sizes) - len(physical)) + physical
        for i, size in enumerate(reversed(sizes), 1):
            physical[-i] = -(-physical[-i] // size) * size
        return -(-math.prod(physical) * _BITS[self.dtype] // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: its name, without the percent sign.
      opcode: such as "all-gather-start".
      types: the result's arrays; more than one for a tuple.
      operands: names of its operands.
      attributes: the rest of the line.
      is_root: whether the computation returns this instruction's result.
      literal: of a constant or a parameter, the text in its parentheses.
    """

    name: str
    opcode: str
    types: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    literal: str = ""

    def attribute(self, name: str) -> str:
        """The value of ``name=...``, up to the next comma; empty if absent."""
        found = re.search(rf"\b{name}=", self.attributes)
        if not found:
            return ""
        rest = self.attributes[found.end() :]
        return rest[: _end_of_value(rest)]

    @property
    def op_name(self) -> str:
        """The name that jax gave the operation; empty if it has none."""
        named = _OP_NAME.search(self.attributes)
        return named.group(1).replace("\\'", "'") if named else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that this instruction calls."""
        names: list[str] = []
        for one, several in _CALLED.findall(self.attributes):
            names += [one] if one else re.findall(r"[\w.\-]+", several)
        return tuple(names)


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the program.

    Attributes:
      name: its name.
      instructions: by name, in the order printed.
    """

    name: str
    instructions: Mapping[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The instruction whose result it returns."""
        return next(i for i in self.instructions.values() if i.is_root)


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed program.

    Attributes:
      computations: by name.
      entry: the one that runs.
      taken: how often each branch of a conditional is taken, as a fraction, where the
        program does not say.
      listed: types of the entry's parameters in the program's first line.
    """

    computations: Mapping[str, Computation]
    entry: Computation
    taken: float = 1.0
    listed: tuple[ArrayType, ...] = ()

    def taken_by(self, conditional: Instruction) -> list[float]:
        """How often each branch of a conditional is taken, as a fraction.

        Where one number is said it is of the costliest branch, and so of any.
        """
        said = fractions_in(conditional.op_name) or (self.taken,)
        branches = len(conditional.called)
        return list(said) if len(said) == branches else [max(said)] * branches

    @property
    def parameters(self) -> Iterator[tuple[Instruction, bool]]:
        """The entry's parameters, each with whether it is in the host's memory.

        XLA:CPU says it in the program's first line, XLA:GPU at the parameter.
        """
        listed = dict(enumerate(self.listed))
        for instruction in self.entry.instructions.values():
            if instruction.opcode == "parameter":
                types = list(instruction.types)
                number = int(instruction.literal)
                types += [listed[number]] if number in listed else []
                yield instruction, any(array.is_on_host for array in types)


def parse(text: str, taken: float = 1.0) -> Module:
    """Parse HLO text.

    Args:
      text: from ``Compiled.as_text()``, on any backend.
      taken: as in `Module`.

    Returns:
      The program.

    Raises:
      ValueError: if the text has no entry computation.

    Example:
      >>> module = parse('''ENTRY %main (x: f32[4]) -> f32[4] {
      ...   ROOT %x = f32[4]{0} parameter(0)
      ... }
      ... ''')
      >>> module.entry.root.types[0].bytes
      16
    """
    computations: dict[str, Computation] = {}
    entry, current = None, {}
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = {}
            computation = Computation(header.group(2), current)
            computations[computation.name] = computation
            entry = computation if header.group(1) else entry
        elif found := _INSTRUCTION.match(line):
            instruction = _instruction(*found.groups())
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError(
            "parse: the text has no ENTRY computation, so it is not a compiled "
            "program; pass what Compiled.as_text() gives."
        )
    listed = _ARGUMENTS.search(text)
    types = tuple(arrays(listed.group(1))) if listed else ()
    return Module(computations, entry, taken, types)


def arrays(text: str) -> Iterator[ArrayType]:
    """Find the array types in a piece of HLO text."""
    for dtype, dims, layout in _ARRAY.findall(text):
        if dtype in _BITS:
            # A bound of a dynamic dim is printed as <=8.
            sizes = [int(d.strip().removeprefix("<=")) for d in dims.split(",") if d]
            yield ArrayType(dtype, tuple(sizes), layout)


def _instruction(root: str | None, name: str, rest: str) -> Instruction:
    opcode = _OPCODE.search(" " + rest)
    if opcode is None:
        raise ValueError(f"parse: no operation in the line of %{name}: {rest[:200]!r}")
    kinds = rest[: max(opcode.start() - 1, 0)]
    inside = rest[opcode.end() - 1 :]
    end = _end_of_value(inside, closing=")")
    operands = re.findall(r"%([\w.\-]+)", inside[:end])
    return Instruction(
        name=name,
        opcode=opcode.group(1),
        types=tuple(arrays(kinds)),
        operands=tuple(operands),
        attributes=inside[end + 1 :],
        is_root=bool(root),
        literal="" if operands else inside[:end],
    )


def _end_of_value(text: str, closing: str = ",") -> int:
    """Where a value ends: at `closing` outside of brackets and strings."""
    depth, quoted = 0, False
    for i, c in enumerate(text):
        if c == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif depth == 0 and c == closing:
            return i
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth < 0:
                return i
    return len(text)


def runs_of(module: Module) -> tuple[dict[str, int], tuple[str, ...]]:
    """Count how often each computation runs when the program runs once.

    A loop's body runs as often as the loop's trip count says; each branch of a
    conditional as often as `Module.taken_by` says.

    Args:
      module: the program.

    Returns:
      (computation name -> runs, names of the loops whose count is not known, whose
      bodies are counted once).
    """
    runs: dict[str, float] = {}
    unknown: list[str] = []

    def visit(computation: Computation, times: float) -> None:
        runs[computation.name] = runs.get(computation.name, 0) + times
        for instruction in computation.instructions.values():
            often = [1.0] * len(instruction.called)
            if instruction.opcode == "while":
                trips = trip_count(module, computation, instruction)
                if trips is None:
                    unknown.append(instruction.name)
                often = [1.0 if trips is None else trips] * len(often)
            elif instruction.opcode == "conditional":
                often = module.taken_by(instruction)
            for name, each in zip(instruction.called, often, strict=True):
                if name in module.computations:
                    visit(module.computations[name], times * each)

    visit(module.entry, 1.0)
    return {name: round(times) for name, times in runs.items()}, tuple(unknown)


def trip_count(
    module: Module, computation: Computation, loop: Instruction
) -> float | None:
    """Count a loop's trips: as annotated, from its own counter (TPU), or as expected.

    Args:
      module: the program.
      computation: the one that contains the loop.
      loop: a "while" instruction.

    Returns:
      The count, which is an average where `jaxpar.jaxprs.branches.expected_turns` says
      it; None where the program does not say.
    """
    counted = _counted(module, computation, loop)
    return turns_in(loop.op_name) if counted is None else float(counted)


def _counted(module: Module, computation: Computation, loop: Instruction) -> int | None:
    annotated = re.search(r'known_trip_count"?:?=?\{"?n"?:"?(\d+)', loop.attributes)
    if annotated:
        return int(annotated.group(1))
    condition = module.computations[loop.attribute("condition").lstrip("%")]
    test = condition.root
    if test.opcode != "compare" or test.attribute("direction") != "LT":
        return None
    counter, bound = (condition.instructions[name] for name in test.operands)
    index = counter.attribute("index")
    init = computation.instructions[loop.operands[0]]
    if counter.opcode != "get-tuple-element" or init.opcode != "tuple":
        return None
    start = _constant(computation, init.operands[int(index)])
    if bound.opcode == "get-tuple-element":
        end = _constant(computation, init.operands[int(bound.attribute("index"))])
    else:
        end = _constant(condition, bound.name)
    body = module.computations[loop.attribute("body").lstrip("%")]
    step = _step(computation, init, body, int(index))
    if start is None or end is None or not step:
        return None
    return max(0, -(-(end - start) // step))


def _step(
    outside: Computation, init: Instruction, body: Computation, index: int
) -> int | None:
    """What the body adds to the counter per trip."""
    if body.root.opcode != "tuple":
        return None
    add = _behind_copies(body, body.root.operands[index])
    if add.opcode != "add":
        return None
    for name in add.operands:
        operand = _behind_copies(body, name)
        value = _constant(body, name)
        if value is None and operand.opcode == "get-tuple-element":
            position = int(operand.attribute("index"))
            if position != index:
                value = _constant(outside, init.operands[position])
        if value is not None:
            return value
    return None


def _behind_copies(computation: Computation, name: str) -> Instruction:
    instruction = computation.instructions[name]
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _constant(computation: Computation, name: str) -> int | None:
    found = _behind_copies(computation, name)
    is_number = found.opcode == "constant" and re.fullmatch(r"-?\d+", found.literal)
    return int(found.literal) if is_number else None
