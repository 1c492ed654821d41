"""How does a compiled function call the host, on each device for itself?

As `jax.pure_callback` does, but the callback is given the operands' memory, not JAX
arrays: making those in a callback takes threads of XLA's CPU backend, of which there
may be none left while every device is in one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from numpy.typing import ArrayLike

from jaxpar.jaxprs.evaluate import PLACEHOLDER

_HOST_CALL = Primitive("jaxpar_host_call")


def planned_call(name: str, out: jax.ShapeDtypeStruct, *args: jax.Array) -> jax.Array:
    """What stands for a `host_call` in a program that is compiled and never run."""
    return jax.ffi.ffi_call(f"{PLACEHOLDER}.{name}", out)(*args)


def host_call(
    function: Callable[..., ArrayLike], out: jax.ShapeDtypeStruct, *args: jax.Array
) -> jax.Array:
    """Call a function of NumPy arrays; traceable where all mesh axes are manual.

    Args:
      function: ``(*arrays) -> array``. Its arguments are valid during the call. It may
        be called by several threads, and must not raise: other devices would wait.
      out: what it returns.
      *args: arrays.
    """
    return _HOST_CALL.bind(*args, function=function, shape=out.shape, dtype=out.dtype)


@_HOST_CALL.def_abstract_eval
def _abstract(*_: Any, function: Any, shape: tuple, dtype: Any) -> Any:
    del function
    return ShapedArray(shape, dtype)


def _lowered(
    ctx: Any, *args: Any, function: Callable, shape: tuple, dtype: Any
) -> Sequence[Any]:
    def callback(*given: Any) -> tuple[np.ndarray]:
        found = function(*map(np.asarray, given))
        return (np.asarray(found, dtype).reshape(shape),)

    return mlir.emit_python_callback(
        ctx,
        callback,
        None,
        list(args),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=False,
        returns_token=False,
    )[0]


mlir.register_lowering(_HOST_CALL, _lowered, cacheable=False)
