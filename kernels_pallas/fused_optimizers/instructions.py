"""How does a kernel use an instruction for which jax has no operation?

The approximate roots and quotients that jax emits are right for subnormal numbers too,
which takes three to nine instructions more for each element. Those here take subnormal
numbers as 0.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm


def sqrt(x: jax.Array, layout: Any) -> jax.Array:
    """Compute roots to 1 ulp.

    Args:
      x: fp32, not negative.
      layout: of the array; one of ``plgpu.Layout``.
    """
    return _each(x, layout, "sqrt.approx.ftz.f32")


def reciprocal(x: jax.Array, layout: Any) -> jax.Array:
    """Compute 1 / x to 1 ulp.

    Args:
      x: fp32.
      layout: of the array; one of ``plgpu.Layout``.
    """
    return _each(x, layout, "rcp.approx.ftz.f32")


def _each(x: jax.Array, layout: Any, name: str) -> jax.Array:
    def one(number: Any, _: Any) -> Any:
        return llvm.inline_asm(number.type, [number], f"{name} $0, $1;", "=f,f")

    def run(*given: Any) -> Any:
        _, numbers = given
        return numbers.foreach(one, create_array=True)

    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(run)(x)
