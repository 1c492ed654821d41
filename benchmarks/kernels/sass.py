"""What does a kernel's machine code spend in its loops: instructions, and bounds.

Rates of one multiprocessor of a Hopper GPU, a clock: 2,048 dense 16-bit multiply-adds,
128 bytes of shared memory, 16 exponentials, and one instruction of a warp on each of 4
schedulers.

Source: NVIDIA, "H100 Tensor Core GPU Architecture" (2022); CUDA C++ Programming Guide,
arithmetic instructions of compute capability 9.0.
"""

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

from benchmarks.kernels.machine_code import assembled, spilled_bytes, tool

MULTIPLY_ADDS, SMEM_BYTES, EXPONENTIALS, WARPS = 2048, 128, 16, 4
"""A clock of a multiprocessor; and warps of a warpgroup, one on each scheduler."""

BLOCK = 64 * 64
"""Scores that bounds are given for."""

_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)"
)
_MATMUL = re.compile(r"HGMMA\.64x(\d+)x16\S*\s+R\d+, (gdesc|R\d+)")
_LEFT = re.compile(r"HGMMA\.64x\d+x16\S*\s+R\d+, R(\d+), gdesc")
_TARGET = re.compile(r"\s+(?:U?P[T\d]+, )*R(\d+)")
_WRITES_NONE = re.compile(
    r"(HGMMA|[FHID]SETP|ST|SYNCS|BAR|R2UR|BRA|RED|UTMA|MEMBAR|WARP)"
)
_SHARED = re.compile(r"(LDS|STS|LDSM|STSM)\b")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop around matmuls: what an iteration of one warpgroup executes.

    Attributes:
      instructions: of each warp.
      matmuls: wgmma instructions.
      from_registers: how many of them have their left operand in registers.
      exponentials: of the warpgroup; one for each score, and a few more.
      tensor_clocks: that the tensor cores are busy.
      smem_clocks: that shared memory is read by matmuls, and accessed by warps.
      global_loads: of each warp.
      lost: registers of left operands that are there when the loop begins, and that it
        writes after their matmul: from the second iteration on, something else.
    """

    instructions: int
    matmuls: int
    from_registers: int
    exponentials: int
    tensor_clocks: float
    smem_clocks: float
    global_loads: int
    lost: tuple[int, ...] = ()

    @property
    def blocks(self) -> float:
        """Blocks of 64 x 64 scores of an iteration."""
        return self.exponentials // 1024 * 1024 / BLOCK

    def bounds(self) -> dict[str, float]:
        """Clocks of a multiprocessor for a block of scores, by what they are spent in.

        Copies into and out of shared memory are not among them.
        """
        return {
            "tensor": self.tensor_clocks / self.blocks,
            "smem": self.smem_clocks / self.blocks,
            "issue": self.instructions / self.blocks,
            "exp": self.exponentials / EXPONENTIALS / self.blocks,
        }


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
      spilled: bytes of spill stores and loads.
      smem: bytes of shared memory for operands and results.
      instructions: of the whole kernel.
      loops: around matmuls, in the order of the code.
    """

    spilled: int
    smem: int
    instructions: int
    loops: list[Loop]


def assemble(ptx: Path, nvdisasm: str) -> Kernel:
    """Assemble a kernel that Mosaic GPU has dumped, and disassemble it.

    Args:
      ptx: the file; the kernel's resources are beside it.
      nvdisasm: the disassembler.
    """
    cubin, report = assembled(ptx)
    text = subprocess.run(
        [nvdisasm, "-c", cubin], capture_output=True, text=True, check=True
    ).stdout
    resources = ptx.with_suffix(".resources.txt").read_text()
    smem = re.search(r"smem_scratch_bytes=(\d+)", resources)
    assert smem is not None
    return Kernel(
        spilled=spilled_bytes(report),
        smem=int(smem[1]),
        instructions=len(_instructions(text.splitlines())),
        loops=loops_of(text),
    )


def loops_of(sass: str) -> list[Loop]:
    """Find the innermost loops that have matmuls in a kernel's machine code."""
    lines = sass.splitlines()
    labels = {m[1]: at for at, line in enumerate(lines) if (m := _LABEL.match(line))}
    spans = []
    for at, line in enumerate(lines):
        # Waits that failed jump back unconditionally, from behind the kernel.
        back = re.search(r"@!?U?P\d\s+BRA `\((\.L_\w+)\)", line)
        if back and labels[back[1]] < at:
            spans.append((labels[back[1]], at + 1))
    with_matmuls = [
        s for s in spans if any("HGMMA" in line for line in lines[slice(*s)])
    ]
    innermost = [
        (first, end)
        for first, end in with_matmuls
        if not any(
            first <= a and b <= end and (a, b) != (first, end) for a, b in with_matmuls
        )
    ]
    return [_loop(lines[first:end]) for first, end in sorted(innermost)]


def _instructions(lines: list[str]) -> list[tuple[str, str]]:
    """Opcodes and operands, without padding."""
    found = [m.groups() for line in lines if (m := _INSTRUCTION.match(line))]
    return [(opcode, rest) for opcode, rest in found if opcode != "NOP"]


def _loop(lines: list[str]) -> Loop:
    found = _instructions(lines)
    opcodes = [opcode for opcode, _ in found]
    matmuls = [m for opcode, rest in found if (m := _MATMUL.match(opcode + rest))]
    columns = [int(m[1]) for m in matmuls]
    held = sum(m[2] != "gdesc" for m in matmuls)
    # An operand of 64 x 16 and one of 16 x columns, of 2 bytes each.
    operands = 2048 * (len(matmuls) - held) + sum(32 * n for n in columns)
    accesses = sum(_bytes(opcode) for opcode in opcodes if _SHARED.match(opcode))
    return Loop(
        instructions=len(found),
        matmuls=len(matmuls),
        from_registers=held,
        exponentials=sum(opcode == "MUFU.EX2" for opcode in opcodes) * 32 * WARPS,
        tensor_clocks=sum(64 * 16 * n for n in columns) / MULTIPLY_ADDS,
        smem_clocks=(operands + WARPS * accesses) / SMEM_BYTES,
        global_loads=sum(opcode.startswith("LDG") for opcode in opcodes),
        lost=_lost(found),
    )


def _lost(instructions: list[tuple[str, str]]) -> tuple[int, ...]:
    """Registers of left operands that a loop takes from before it, and overwrites."""
    first_read: dict[int, int] = {}
    writes: dict[int, list[int]] = {}
    for at, (opcode, rest) in enumerate(instructions):
        left = _LEFT.match(opcode + rest)
        for register in _registers(left, 4):
            first_read.setdefault(register, at)
        target = None if _WRITES_NONE.match(opcode) else _TARGET.match(rest)
        for register in _registers(target, _width(opcode)):
            writes.setdefault(register, []).append(at)
    return tuple(
        sorted(
            register
            for register, read in first_read.items()
            if writes.get(register) and min(writes[register]) > read
        )
    )


def _registers(found: re.Match[str] | None, count: int) -> range:
    first = int(found[1]) if found else 0
    return range(first, first + (count if found else 0))


def _width(opcode: str) -> int:
    """Registers that an instruction writes."""
    if opcode.startswith(("LDS", "LDG")) and ".128" in opcode:
        return 4
    if opcode.startswith("LDSM"):
        return 4 if ".4" in opcode else 2
    is_wide = ".64" in opcode and opcode.startswith("LD")
    return 2 if is_wide or ".WIDE" in opcode else 1


def _bytes(opcode: str) -> int:
    """That a warp's access to shared memory moves."""
    if opcode.endswith((".M88.4", ".MT88.4", ".128")):
        return 512
    return 256 if opcode.endswith((".64", ".M88.2", ".MT88.2")) else 128


def find_nvdisasm(asked: str) -> str | None:
    """The disassembler: the requested one, or as `tool` finds it; None without one."""
    return shutil.which(asked) if asked else tool("nvdisasm")
