"""Are loops found in machine code, and their instructions counted by what they use?"""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernels.sass import Loop, find_nvdisasm, loops_of

ROOT = Path(__file__).resolve().parents[2]

WAIT = """
.L_x_9:
        /*0900*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R4+URZ], R3 ;
        /*0910*/              @!P1 BRA `(.L_x_9) ;
        /*0920*/                   BRA `(.L_x_2) ;
"""
INNER = (
    """
.L_x_1:
        /*0100*/                   LDG.E R4, desc[UR6][R8.64] ;
.L_x_2:
        /*0110*/                   HGMMA.64x64x16.F32.BF16 R152, gdesc[UR4], RZ, !UPT ;
        /*0120*/              @!PT HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR8], R24 ;
        /*0130*/                   LDS.64 R2, [R1] ;
        /*0140*/                   STSM.16.M88.4 [R1], R4 ;
        /*0150*/                   NOP ;
"""
    + "        /*0160*/                   MUFU.EX2 R3, R3 ;\n" * 33
)
BACK = "        /*0170*/               @P1 BRA `(.L_x_1) ;\n"
OUTER = "\n.L_x_0:\n" + INNER + BACK + "        /*0180*/   @P0 BRA `(.L_x_0) ;\n" + WAIT


@pytest.mark.parametrize("sass", [INNER + BACK + WAIT, OUTER], ids=["one", "nested"])
def test_innermost_loop_is_counted(sass: str) -> None:
    """64 x 16 x (64 + 128) multiply-adds; of operands 2, 2 and 4 KiB; by warps 3."""
    assert loops_of(sass) == [
        Loop(
            instructions=39,
            matmuls=2,
            from_registers=1,
            exponentials=33 * 128,
            tensor_clocks=32 + 64,
            smem_clocks=(2048 + 2048 + 4096 + 4 * (256 + 512)) / 128,
            global_loads=1,
        )
    ]


def test_bounds_are_of_a_block_of_scores() -> None:
    """The exponentials beyond whole kilos rescale sums, so are of no score."""
    (loop,) = loops_of(INNER + BACK)
    assert loop.blocks == 1
    bounds = loop.bounds()
    assert bounds == {"tensor": 96, "smem": 88, "issue": 39, "exp": 264}


def test_code_without_matmuls_has_no_loops() -> None:
    assert loops_of(WAIT) == []


def test_missing_disassembler_is_named(tmp_path: Path) -> None:
    absent = str(tmp_path / "nvdisasm")
    assert find_nvdisasm(absent) is None
    script = ROOT / "benchmarks/kernels_compiled.py"
    done = subprocess.run(
        [sys.executable, script, "--nvdisasm", absent, "--no-write"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "pip install --target FOLDER nvidia-cuda-nvdisasm" in done.stderr
