"""Has each kernel the FLOPs of its matmuls, and each category its kernels' time?"""

import types
from typing import Any

import pytest

from benchmarks.gpu.roofline import (
    STEPS,
    UNKNOWN,
    Kernel,
    by_category,
    kernels_of,
    row,
    seconds_by_op,
)
from jaxpar.compiled.categories import ATTENTION, LOGITS, TRUNK
from jaxpar.compiled.hardware import load_hardware
from jaxpar.compiled.hlo import parse
from jaxpar.compiled.trace import TracedOp

PROGRAM = """
HloModule step

%fused (p: bf16[8,16], q: bf16[16,32]) -> bf16[8,32] {
  %p = bf16[8,16]{1,0} parameter(0)
  %q = bf16[16,32]{1,0} parameter(1)
  ROOT %d = bf16[8,32]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: bf16[8,16], b: bf16[16,32], c: bf16[32,50]) -> bf16[8,50] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[16,32]{1,0} parameter(1)
  %c = bf16[32,50]{1,0} parameter(2)
  %gemm_fusion = bf16[8,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused
  ROOT %cublas = (bf16[8,50]{1,0}, s8[64]{0}) custom-call(%gemm_fusion, %c), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
"""  # noqa: E501 - a program's lines
H200 = load_hardware("h200")


def test_flops_are_those_of_the_matmuls_in_a_kernel() -> None:
    found = kernels_of(parse(PROGRAM), vocabulary=50)
    assert found["gemm_fusion"].category == TRUNK
    assert found["gemm_fusion"].flops == 2 * 8 * 16 * 32
    assert found["cublas"].category == LOGITS
    assert found["cublas"].flops == pytest.approx(2 * 8 * 32 * 50)


def test_roofline_is_the_larger_of_bytes_and_flops() -> None:
    rate = H200.memory_rate * H200.memory_achieved
    matmuls = H200.peak["bfloat16"] * H200.peak_achieved
    assert Kernel(TRUNK, 10**9, 1.0).seconds(H200) == pytest.approx(1e9 / rate)
    assert Kernel(TRUNK, 1, 1e12).seconds(H200) == pytest.approx(1e12 / matmuls)


def test_time_of_a_step_is_summed_by_kernel() -> None:
    ops = [TracedOp(float(i), i + 0.5, "a", "step") for i in range(2 * STEPS)]
    assert seconds_by_op(ops) == {"a": (pytest.approx(1.0), pytest.approx(2.0))}


def test_category_has_its_kernels_time_over_their_roofline() -> None:
    known = {
        "a": Kernel(TRUNK, 10**9, 0.0),
        "b": Kernel(TRUNK, 10**9, 0.0),
        "c": Kernel(ATTENTION, 10, 0.0),
    }
    times = {"a": (0.001, 1.0), "b": (0.002, 1.0), "c": (0.01, 2.0), "copy": (0.5, 3.0)}
    workload: Any = types.SimpleNamespace(attention_flops=1e12)
    found = by_category(times, known, workload, H200)
    each = 1e12 / (H200.memory_rate * H200.memory_achieved)
    assert found[TRUNK]["ms"] == pytest.approx(3.0)
    assert found[TRUNK]["roofline_ms"] == pytest.approx(2 * each)
    assert found[TRUNK]["of_roofline"] == pytest.approx(3.0 / (2 * each))
    matmuls = H200.peak["bfloat16"] * H200.peak_achieved
    assert found[ATTENTION]["roofline_ms"] == pytest.approx(1e15 / matmuls)
    assert found[UNKNOWN] == {"ms": 500.0, "launches": 3.0}
    assert row("copy", 0.5, 3.0, known, H200)["category"] == UNKNOWN
