"""Do fused optimizers compile for an H200 that is not here, in registers and place?"""

import json
import shutil
import subprocess
import sys

import jax
import pytest

from kernels_pallas.backend import LEAST_JAX
from tests.compiled import compilers
from tests.compiled.assembler import ROOT, Assembly, compiled_by
from tests.compiled.optimizer_kernels import CONFIGURATIONS, TILES

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < LEAST_JAX or not compilers.FOLDER.is_dir(),
    reason="needs the compilers of the main lane",
)


@pytest.fixture(scope="module")
def compiled() -> list[Assembly]:
    return compiled_by("tests.compiled.optimizer_kernels")


def test_every_configuration_is_compiled(compiled: list[Assembly]) -> None:
    assert len(compiled) == len(CONFIGURATIONS)
    for found, _, used in compiled:
        assert found["kernels"] == len(used) == (2 if found["name"] == "lamb" else 1)


def test_nothing_is_spilled(compiled: list[Assembly]) -> None:
    for found, spilled, _ in compiled:
        assert len(spilled) == 2 * found["kernels"], "stores and loads of each"
        assert not any(spilled), found


def test_six_programs_fit_a_multiprocessor(compiled: list[Assembly]) -> None:
    """65,536 registers; loads of others run while one waits for its own."""
    for found, _, used in compiled:
        assert all(registers * 128 * 6 <= 65_536 for registers in used), found


def test_nothing_is_added_up_in_any_order(compiled: list[Assembly]) -> None:
    """Replicas would drift apart: a scatter adds as its threads come."""
    assert not any(found["scatters"] for found, _, _ in compiled)


def test_state_is_changed_in_place(compiled: list[Assembly]) -> None:
    """But for the tuple's own pointers; temporaries are numbers of tiles."""
    for found, _, _ in compiled:
        assert found["outputs"] - found["aliased"] < 100, found
        assert found["temporaries"] < 40 * TILES, found


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs CUDA's assembler")
def test_eight_bits_take_fewer_instructions_than_bind_them() -> None:
    """70 an element: at 1.7 GHz an H200 issues as many for 6.5 TB/s, and moves 4.8."""
    row = (
        "import json; from benchmarks.kernel_instructions import *; prepare_process(); "
        "print(json.dumps(row_of(kernels_of(RULES['adamw'], 8))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", row],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["instructions_an_element"] < 70
    assert not found["spilled_bytes"]
