"""Is a kernel's time that of its bytes or of its FLOPs, whichever is longer?"""

import jax
import jax.numpy as jnp
import pytest

from jaxpar.compiled.hardware import load_hardware
from jaxpar.compiled.hlo import parse
from jaxpar.compiled.kernel_time import (
    Rates,
    kernel_seconds,
    matmul_flops,
    rates_of,
)

PROGRAM = """
%fused (a: bf16[8,4], b: bf16[4,2]) -> bf16[8,2] {
  %a = bf16[8,4]{1,0} parameter(0)
  %b = bf16[4,2]{1,0} parameter(1)
  ROOT %d = bf16[8,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[8,4], y: bf16[4,2], z: f32[8,4]) -> bf16[8,2] {
  %x = bf16[8,4]{1,0} parameter(0)
  %y = bf16[4,2]{1,0} parameter(1)
  %z = f32[8,4]{1,0} parameter(2)
  %matmul = bf16[8,2]{1,0} fusion(%x, %y), kind=kCustom, calls=%fused
  %library = (f32[8,8]{1,0}, s8[99]{0}) custom-call(%z, %z), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %stated = bf16[8,2]{1,0} custom-call(%matmul), custom_call_target="attention", \
backend_config={flops = 5000 : i64}
  ROOT %plain = bf16[8,2]{1,0} negate(%stated)
}
"""
FLOPS = {
    "matmul": {"bf16": 2 * 8 * 2 * 4},
    "library": {"f32": 2 * 8 * 8 * 4},
    "stated": {},
    "plain": {},
}


@pytest.mark.parametrize("name", FLOPS)
def test_flops_are_those_of_matmuls(name):
    module = parse(PROGRAM)
    kernel = module.entry.instructions[name]
    assert matmul_flops(kernel, module.entry, module) == FLOPS[name]


@pytest.mark.parametrize(
    ("name", "memory", "seconds"),
    [
        ("matmul", 1e9, 128 / 100),
        ("matmul", 0.1, (64 + 16 + 32) / 0.1),
        ("library", 1e9, 512 / 50),
        ("stated", 1e9, 5000 / 25),
        ("stated", 0.1, 64 / 0.1),
        ("plain", 8.0, 64 / 8),
    ],
)
def test_a_kernel_takes_the_longer_of_moving_and_multiplying(name, memory, seconds):
    rates = Rates(memory, {"bfloat16": 100.0, "float32": 50.0}, attention=25.0)
    module = parse(PROGRAM)
    kernel = module.entry.instructions[name]
    found = kernel_seconds(kernel, module.entry, module, rates)
    assert found == pytest.approx(seconds)


def test_each_launch_adds_its_own_time():
    module = parse(PROGRAM)
    kernel = module.entry.instructions["plain"]
    rates = Rates(8.0, {"bfloat16": 1.0}, attention=1.0, launch=0.5)
    assert kernel_seconds(kernel, module.entry, module, rates) == 64 / 8 + 0.5


def test_flops_of_a_real_program_are_its_matmuls():
    x, y = jnp.ones((32, 16)), jnp.ones((16, 8))
    compiled = jax.jit(lambda x, y: jnp.tanh(x @ y) @ y.T).lower(x, y).compile()
    module = parse(compiled.as_text() or "")
    found = [
        number
        for computation in module.computations.values()
        for each in computation.instructions.values()
        if each.opcode == "dot"
        for number in matmul_flops(each, computation, module).values()
    ]
    assert sum(found) == 2 * (2 * 32 * 16 * 8)


def test_rates_are_what_programs_reach():
    found = rates_of(load_hardware("h200"))
    assert found.memory == pytest.approx(0.9 * 4.8e12)
    assert found.matmuls["bfloat16"] == pytest.approx(0.803 * 989.4e12)
    assert found.attention == found.matmuls["bfloat16"]
    assert found.launch == 0.0
