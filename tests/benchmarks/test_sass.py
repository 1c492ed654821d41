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


LOOP = """
.L_x_1:
        /*0110*/                   HGMMA.64x64x16.F32.BF16 R24, R152, gdesc[UR8], R24 ;
        /*0120*/                   LDS.64 R160, [R1] ;
        /*0130*/                   HGMMA.64x64x16.F32.BF16 R24, R160, gdesc[UR8], R24 ;
        /*0140*/               @P0 {write} ;
        /*0150*/                   STS.64 [R1], R154 ;
        /*0160*/               @P1 BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize(
    ("write", "lost"),
    [
        ("MOV R3, R152", ()),
        ("F2FP.BF16.F32.PACK_AB R155, R34, R35", (155,)),
        ("LDS.128 R148, [R1]", ()),
        ("LDSM.16.M88.4 R152, [R1]", (152, 153, 154, 155)),
        ("IMAD.WIDE.U32 R154, R3, R3, R4", (154, 155)),
        ("FSETP.GT.AND P2, PT, R153, R3, PT", ()),
    ],
)
def test_operands_that_a_loop_overwrites_are_lost(
    write: str, lost: tuple[int, ...]
) -> None:
    (loop,) = loops_of(LOOP.replace("{write}", write))
    assert loop.lost == lost


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
