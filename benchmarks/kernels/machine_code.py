"""What do Mosaic kernels consist of: machine instructions, registers, spilled bytes?

The compiler leaves each kernel's PTX in a folder; CUDA's assembler (``ptxas``, on the
path) makes machine code of it, as the driver or jax would. An instruction of compute
capability 9.0 takes 16 bytes, so that no disassembler is needed.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "MOSAIC_GPU_DUMP_TO"
_ELF_HEADER, _ELF_SECTION = "<40xQ10x3H", "<2I4Q"
_NOP, _OPCODE = 0x918, 0xFFF


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel's machine code.

    Attributes:
      name: of the file of its PTX.
      instructions: without those that only pad; each counts once, in loops too.
      registers: of a thread.
      spilled: bytes that a thread stores and loads for want of registers.
      is_straight: whether it has no loop: a thread runs each instruction once.
    """

    name: str
    instructions: int
    registers: int
    spilled: int
    is_straight: bool


@contextlib.contextmanager
def dumped() -> Iterator[Path]:
    """Make the compiler write PTX to a temporary folder, inside the context."""
    before = os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before


def read_kernels(folder: Path) -> list[Kernel]:
    """Assemble the kernels whose PTX is in a folder; by name.

    Raises:
      FileNotFoundError: without ``ptxas``.
    """
    return [_read(path) for path in sorted(folder.glob("*.ptx"))]


def assembled(ptx: Path) -> tuple[Path, str]:
    """Assemble a kernel; its machine code is beside the PTX.

    Returns:
      The file, and what the assembler reports of registers and spills.

    Raises:
      FileNotFoundError: without ``ptxas``.
    """
    assembler = tool("ptxas")
    if assembler is None:
        raise FileNotFoundError(
            "ptxas is not on the path; it is part of CUDA, and of the package "
            "nvidia-cuda-nvcc, which `make compilers` installs."
        )
    target = ptx.with_suffix(".cubin")
    command = [assembler, "-arch=sm_90a", "-v", str(ptx), "-o", str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return target, done.stderr


def tool(name: str) -> str | None:
    """A program of CUDA: of `make compilers`, or on the path; None without one."""
    folder = Path(sys.prefix) / "assembler" / "nvidia" / "cu13" / "bin"
    own = folder / name
    if own.is_file():  # Wheels may lack the mark of a program.
        own.chmod(own.stat().st_mode | stat.S_IXUSR)
    return shutil.which(name, path=str(folder)) or shutil.which(name)


def spilled_bytes(report: str) -> int:
    """Bytes that a thread stores and loads for want of registers."""
    return sum(map(int, re.findall(r"(\d+) bytes spill", report)))


def _read(path: Path) -> Kernel:
    target, report = assembled(path)
    (registers,) = re.findall(r"Used (\d+) registers", report)
    return Kernel(
        name=path.stem,
        instructions=sum(map(_num_instructions, _code(target.read_bytes()))),
        registers=int(registers),
        spilled=spilled_bytes(report),
        is_straight=not _jumps_back(path.read_text()),
    )


def _code(elf: bytes) -> Iterator[bytes]:
    """The sections of machine code."""
    table, size, num, of_names = struct.unpack_from(_ELF_HEADER, elf)
    sections = [
        struct.unpack_from(_ELF_SECTION, elf, table + size * i) for i in range(num)
    ]
    names = elf[sections[of_names][4] :]
    for name, _, _, _, start, length in sections:
        if names[name:].startswith(b".text."):
            yield elf[start : start + length]


def _num_instructions(code: bytes) -> int:
    words = struct.unpack(f"<{len(code) // 16 * 2}Q", code)
    return sum(word & _OPCODE != _NOP for word in words[::2])


def _jumps_back(ptx: str) -> bool:
    lines = ptx.splitlines()
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    jumps = [(i, re.search(r"\bbra\S*\s+(\S+);", x)) for i, x in enumerate(lines)]
    return any(found and labels[found[1]] < i for i, found in jumps)
