"""Does the GPT's step on an H200 move what it did when it was measured, and no more?

Two layers of GPT-2 124M show what its twelve do. The residual stream was stored
transposed from 32 rows on, no norm was one kernel then, and fp32 logits were held
whole: twelve layers moved 140.7 GB, and 99.3 when these numbers were recorded.
"""

import pytest

from jaxpar.compiled.categories import Moved, total
from tests.compiled.gpt_bytes import LAYERS, Cut, compile_cut

ROWS = [8, 16, 32, 64]
TOLERANCE = 0.03

# Rows -> category -> (launches, launches in loops, GB), by jax 0.11.2.
BUDGETS: dict[int, dict[str, tuple[int, int, float]]] = {
    8: {
        "matmuls of logits": (3, 0, 2.742),
        "cross entropy": (2, 0, 2.485),
        "optimizer": (43, 0, 1.565),
        "norms and the rest": (85, 0, 1.484),
        "matmuls": (24, 0, 1.331),
        "activations": (4, 0, 0.504),
        "casts and copies": (32, 0, 0.430),
        "attention": (4, 0, 0.304),
    },
    16: {
        "matmuls of logits": (0, 6, 5.948),
        "cross entropy": (1, 4, 5.202),
        "norms and the rest": (81, 10, 2.635),
        "matmuls": (25, 0, 2.565),
        "optimizer": (43, 0, 1.563),
        "activations": (4, 0, 1.008),
        "attention": (4, 0, 0.607),
        "transposes": (1, 0, 0.309),
        "casts and copies": (30, 6, 0.269),
    },
    32: {
        "matmuls of logits": (0, 12, 11.896),
        "cross entropy": (1, 8, 10.173),
        "matmuls": (25, 0, 5.006),
        "norms and the rest": (81, 20, 4.879),
        "activations": (4, 0, 2.015),
        "optimizer": (43, 0, 1.563),
        "attention": (4, 0, 1.214),
        "transposes": (1, 0, 0.309),
        "casts and copies": (32, 12, 0.295),
    },
    64: {
        "matmuls of logits": (0, 24, 23.791),
        "cross entropy": (1, 16, 20.114),
        "matmuls": (25, 0, 9.889),
        "norms and the rest": (85, 40, 9.784),
        "activations": (4, 0, 4.030),
        "attention": (4, 0, 2.429),
        "optimizer": (43, 0, 1.563),
        "casts and copies": (32, 24, 0.345),
        "transposes": (1, 0, 0.309),
    },
}


@pytest.fixture(scope="module", params=ROWS)
def cut(request, compiled) -> tuple[int, Cut]:
    return request.param, compiled(compile_cut, request.param)


def test_residual_stream_is_row_major_and_norms_are_one_kernel(cut):
    _, found = cut
    assert found.transposed == 0
    assert found.norms == 2 * LAYERS + 1
    assert found.wide == 0, "no fp32 copy of the residual stream is written"


def test_whole_logits_are_not_in_fp32(cut):
    _, found = cut
    assert found.fp32_logits == 0


def test_kernels_move_what_was_recorded(cut):
    rows, found = cut
    budget = BUDGETS[rows]
    assert found.moved.keys() == budget.keys()
    for name, (launches, in_loops, gigabytes) in budget.items():
        own = found.moved[name]
        assert own.bytes / 1e9 <= (1 + TOLERANCE) * gigabytes, name
        assert own.launches <= max(launches + 1, (1 + TOLERANCE) * launches), name
        assert own.in_loops <= max(in_loops + 1, (1 + TOLERANCE) * in_loops), name
    whole = sum((Moved(*entry[:2]) for entry in budget.values()), Moved())
    assert total(found.moved).launches <= (1 + TOLERANCE) * whole.launches
