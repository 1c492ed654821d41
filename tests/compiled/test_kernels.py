"""Do the kernels compile for an H200 that is not here, and stay in its registers?"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks.kernels.machine_code import tool
from benchmarks.kernels.sass import assemble, find_nvdisasm
from kernels_pallas.backend import LEAST_JAX
from kernels_pallas.block_sparse_attention.api import KERNEL_TILE
from tests.compiled import compilers
from tests.compiled.assembler import ROOT, Assembly, compiled_by, run
from tests.compiled.kernels import CONFIGURATIONS, HEADS, SEQ_LEN

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        jax.__version_info__ < LEAST_JAX or not compilers.FOLDER.is_dir(),
        reason="needs the compilers of the main lane",
    ),
]


@pytest.fixture(scope="module")
def compiled() -> list[Assembly]:
    return compiled_by("tests.compiled.kernels")


def test_every_configuration_is_compiled(compiled) -> None:
    assert len(compiled) == len(CONFIGURATIONS)
    for found, _, used in compiled:
        # Forward; and of queries, and of keys and values, or of all three.
        assert found["kernels"] == (3 if found["deterministic"] else 2)
        assert len(used) == found["kernels"]


def test_nothing_is_spilled(compiled) -> None:
    for found, spilled, _ in compiled:
        assert len(spilled) == 2 * found["kernels"], "stores and loads of each"
        assert not any(spilled), found


def test_no_loop_overwrites_an_operand_that_it_begins_with(tmp_path: Path) -> None:
    """CUDA 13.0's assembler does so: gradients were wrong on an H100."""
    nvdisasm = find_nvdisasm("")
    if tool("ptxas") is None or nvdisasm is None:
        pytest.skip("needs CUDA's assembler and disassembler: `make compilers`")
    run("tests.compiled.kernels", "limits", MOSAIC_GPU_DUMP_TO=str(tmp_path))
    kernels = {path.stem: assemble(path, nvdisasm) for path in tmp_path.glob("*.ptx")}
    lost = {
        name: loop.lost
        for name, kernel in kernels.items()
        for loop in kernel.loops
        if loop.lost
    }
    assert not lost
    held = sum(loop.from_registers for k in kernels.values() for loop in k.loops)
    assert held > 0


def test_program_around_the_kernels_makes_no_copies_of_operands(compiled) -> None:
    """Besides numbers of each row, fp32 sums of one pass, parts and their sums."""
    for found, _, _ in compiled:
        rows = 4 * SEQ_LEN * HEADS
        parts = 4 * found["parts"] * KERNEL_TILE.k * found["size"]
        sums = 0 if found["deterministic"] else rows * found["size"]
        assert found["temporaries"] < 12 * rows + sums + 1.5 * parts, found


def test_split_over_a_mesh_moves_no_more_than_dense_attention(tmp_path: Path) -> None:
    """Rows over data, heads over tensor: each device attends to its own."""
    path = tmp_path / "plan.json"
    flags = ("--precision", "bf16", "--block", "128", "--pattern", "bigbird")
    sizes = ("--seq-len", "2048", "--batch-size", "4", "--global-tokens", "128")
    mesh = ("--mesh.data", "2", "--mesh.tensor", "2")
    recipe = ("recipes/long_context.py", "--target", "h200:1x4", "--json", str(path))
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar", "plan", *recipe, "--", *flags, *sizes, *mesh],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    plan = json.loads(path.read_text())
    assert any("kernels replace" in note for note in plan["notes"])
    gathered = {
        row["dtype"]: row["bytes"]
        for row in plan["collectives"]
        if row["op"] == "all-gather" and row["axis"] == "tensor"
    }
    # Queries of one row alone are 2 x 2048 x 128 bytes.
    assert gathered["bf16"] < 2 * 2048 * 128 / 10
    # The loss: a maximum, a sum and a target's logit of each shard's vocabulary.
    assert gathered["f32"] == 2 * 2048 * 3 * 4 * 2
