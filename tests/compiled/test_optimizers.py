"""Do fused optimizers step in place, in as few kernels as there are buckets?

And is what Muon's loops multiply exchanged once a step, and not in every turn?"""

import dataclasses

import pytest

from tests.compiled.programs import Run, compile_step, plan_notes

FILLING, COPIES = 1.01, 2
KEPT = {"fused": 12 + COPIES, "fused 8 bits": 4 + 2 + COPIES, "fused lamb": 12 + COPIES}
"""Bytes a parameter: masters, moments, and the copies in bf16."""


@pytest.mark.parametrize(
    "optimizer",
    ["fused", "fused 8 bits", pytest.param("fused lamb", marks=pytest.mark.slow)],
)
def test_one_kernel_covers_all_leaves_in_place(compiled, optimizer):
    """Two for trust ratios; all leaves of this model rest over data."""
    step = compiled(compile_step, Run(zero=1, optimizer=optimizer))
    memory = step.program.memory
    assert step.kernels == (2 if optimizer == "fused lamb" else 1)
    assert step.copied < 1e3
    assert memory.outputs - memory.aliased < 1e3
    per_parameter = step.program.bytes_of("state") * step.num_devices / step.psi
    assert KEPT[optimizer] <= per_parameter <= KEPT[optimizer] * FILLING


@pytest.mark.parametrize(
    "zero", [3, *(pytest.param(z, marks=pytest.mark.slow) for z in (0, 2))]
)
def test_every_stage_steps_in_place(compiled, zero):
    step = compiled(compile_step, Run(zero=zero, optimizer="fused"))
    memory = step.program.memory
    assert step.kernels == 1
    assert step.copied < 1e3
    assert memory.outputs - memory.aliased < 1e3


def test_buckets_cross_data_as_leaves_do(compiled):
    """Between leaves and buckets nothing moves."""
    step = compiled(compile_step, Run(zero=1, optimizer="fused"))
    program, whole = step.program, 2 * step.psi
    assert program.communicated_bytes("all-gather", "data") == pytest.approx(
        whole, 2e-2
    )
    assert program.communicated_bytes("reduce-scatter", "data") == pytest.approx(
        whole, 2e-2
    )
    kinds = {row.kind for row in program.collectives if row.bytes > 1e6}
    assert kinds == {"all-gather", "reduce-scatter"}


MUON = {
    # Of six equal kernels, filled up to a stack of one for each of eight GPUs.
    "leaves": (Run(hosts=1, optimizer="muon", users_model=True, layers=6, width=256),
               8 * 256**2),
    "layers": (Run(hosts=1, optimizer="muon", layers=8, width=256, vocab=1024),
               8 * 12 * 256**2),
}  # fmt: skip


@pytest.mark.parametrize("zero", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", ["leaves", pytest.param("layers", marks=pytest.mark.slow)]
)
def test_muon_exchanges_matrices_once(compiled, case, zero):
    """In fp32, there and back: of all kinds less than one gather of the matrices."""
    run, elements = MUON[case]
    step = compiled(compile_step, dataclasses.replace(run, zero=zero))
    assert (
        step.program.communicated_bytes("all-to-all", "data") == 2 * 4 * elements // 8
    )
    others = [
        row.bytes
        for row in step.program.collectives
        if row.dtype == "f32" and row.kind != "all-to-all"
    ]
    assert sum(others) < 1e3


@pytest.mark.slow
def test_plan_tells_of_the_buckets_and_of_cudnns_attention(compiled):
    notes = " ".join(compiled(plan_notes, Run(hosts=1, optimizer="fused")))
    assert "leaves are in buckets (over_data)" in notes
    assert "attention is a call with the bytes and FLOPs of cuDNN's" in notes
