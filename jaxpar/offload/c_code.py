"""How is an elementwise part of an update written in C, as one loop over its elements?

An optimizer reads and writes each element once, so that on a CPU it is bound by memory,
if nothing between is stored: one loop does what XLA:CPU does in several. The arithmetic
is IEEE's, operation by operation.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxpar.jaxprs.by_element import ByElement
from jaxpar.jaxprs.evaluate import shape_of

FUNCTION = "update"
"""The name of the C function: ``void update(int64_t begin, int64_t end, void **arrays,
void **scalars)``; the arrays are inputs, then outputs."""

_TYPES = {
    "float32": "float",
    "float64": "double",
    "bfloat16": "float",
    "float16": "float",
    "int32": "int32_t",
    "uint32": "uint32_t",
    "int8": "int8_t",
    "uint8": "uint8_t",
    "bool": "uint8_t",
}
"""dtype -> C type of a value. Values of 16 bits are floats, which are rounded where
they are stored, as XLA does by default (``xla_allow_excess_precision``)."""

_BEGIN = """#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float read_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static inline uint16_t write_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (uint16_t)(x != x ? (bits >> 16) | 0x40 : even);
}
"""

_INFIX = {
    "add": "+",
    "add_any": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "&",
    "or": "|",
    "xor": "^",
}
_CALLS = {
    "abs": "fabs",
    "atan2": "atan2",
    "cbrt": "cbrt",
    "ceil": "ceil",
    "cos": "cos",
    "erf": "erf",
    "exp": "exp",
    "exp2": "exp2",
    "expm1": "expm1",
    "floor": "floor",
    "log": "log",
    "log1p": "log1p",
    "pow": "pow",
    "rem": "fmod",
    "sin": "sin",
    "sqrt": "sqrt",
    "tan": "tan",
    "tanh": "tanh",
}
_OTHERS: dict[str, Callable[..., str]] = {
    "clamp": lambda a, x, b: f"({x} < {a} ? {a} : {x} > {b} ? {b} : {x})",
    "copy": lambda x: x,
    "is_finite": lambda x: f"(isfinite((double)({x})) != 0)",
    "logistic": lambda x: f"1.0f / (1.0f + expf(-{x}))",
    "max": lambda a, b: f"({a} > {b} || {a} != {a} ? {a} : {b})",
    "min": lambda a, b: f"({a} < {b} || {a} != {a} ? {a} : {b})",
    "neg": lambda x: f"-{x}",
    "rsqrt": lambda x: f"1.0f / sqrtf({x})",
    "select_n": lambda which, no, yes: f"({which} ? {yes} : {no})",
    "sign": lambda x: f"({x} != {x} ? {x} : ({x} > 0) - ({x} < 0))",
    "square": lambda x: f"{x} * {x}",
    "stop_gradient": lambda x: x,
}
_OF_FLOATS = {"clamp", "logistic", "rsqrt", *_CALLS}


class NotInCError(Exception):
    """An operation or a dtype that this module does not write in C."""


def c_code(part: ByElement, copy_dtype: Any | None) -> str:
    """The C source of an elementwise part.

    Args:
      part: the part.
      copy_dtype: of a further output, the first one cast; None for no such output.

    Returns:
      A source of one function, `FUNCTION`.

    Raises:
      NotInCError: if an operation or a dtype has no C here.
    """
    names: dict[Any, str] = {}
    lines = []
    for number, var in enumerate(part.scalars):
        names[var] = f"s{number}"
        kind = _stored(dtype := shape_of(var).dtype)
        value = _read(dtype, f"*(const {kind} *)scalars[{number}]")
        lines.append(f"  const {_type(dtype)} s{number} = {value};")
    dtypes = [shape_of(var).dtype for var in (*part.inputs, *part.outs)]
    dtypes += [] if copy_dtype is None else [jnp.dtype(copy_dtype)]
    for number, dtype in enumerate(dtypes):
        kind = _stored(dtype)
        lines.append(f"  {kind} *a{number} = ({kind} *)arrays[{number}];")
    body = []
    for number, var in enumerate(part.inputs):
        names[var], dtype = f"x{number}", shape_of(var).dtype
        body.append(f"{_type(dtype)} x{number} = {_read(dtype, f'a{number}[i]')};")
    for number, eqn in enumerate(part.eqns):
        (out,) = eqn.outvars
        names[out] = f"v{number}"
        kind = _type(shape_of(out).dtype)
        body.append(f"{kind} v{number} = {_expression(eqn, names)};")
    results = [_name(names, atom) for atom in part.outs]
    results += [] if copy_dtype is None else results[:1]
    for number, result in enumerate(results, len(part.inputs)):
        body.append(f"a{number}[i] = {_write(dtypes[number], result)};")
    head = f"void {FUNCTION}(int64_t begin, int64_t end, void **arrays, void **scalars)"
    loop = ["#pragma GCC ivdep", "  for (int64_t i = begin; i < end; i++) {"]
    inner = [f"    {line}" for line in body]
    return "\n".join([_BEGIN, f"{head} {{", *lines, *loop, *inner, "  }", "}", ""])


def _expression(eqn: core.JaxprEqn, names: dict[Any, str]) -> str:
    name, dtype = eqn.primitive.name, shape_of(eqn.outvars[0]).dtype
    ins = [_name(names, atom) for atom in eqn.invars]
    of = shape_of(eqn.invars[0]).dtype
    if name in ("broadcast_in_dim", "convert_element_type"):
        found = _converted(ins[0], of, dtype)
    elif name == "integer_pow":
        found = _power(ins[0], eqn.params["y"])
    elif name == "not":
        found = f"!{ins[0]}" if _is_bool(dtype) else f"~{ins[0]}"
    elif name in _INFIX:
        found = f"{ins[0]} {_INFIX[name]} {ins[1]}"
    elif name in _CALLS and _is_float(of) and of.itemsize <= 4:
        found = f"{_CALLS[name]}f({', '.join(ins)})"
    elif name in _OTHERS and (name not in _OF_FLOATS or _is_float(of)):
        found = _OTHERS[name](*ins)
    else:
        raise NotInCError(f"{name} of {of}")
    return f"({_type(dtype)})({found})"


def _power(x: str, exponent: int) -> str:
    product = " * ".join([x] * abs(exponent)) or "1.0f"
    return product if exponent >= 0 else f"1.0f / ({product})"


def _converted(x: str, of: np.dtype, to: np.dtype) -> str:
    if _is_bool(to) and not _is_bool(of):
        return f"({x} != 0)"
    return x


def _name(names: dict[Any, str], atom: Any) -> str:
    if not isinstance(atom, core.Literal):
        return names[atom]
    dtype, value = shape_of(atom).dtype, np.asarray(atom.val)
    if not _is_float(dtype):
        return str(int(value))
    number = float(value)
    if math.isnan(number) or math.isinf(number):
        text = (
            "NAN" if math.isnan(number) else "-INFINITY" if number < 0 else "INFINITY"
        )
        return f"({_type(dtype)}){text}"
    return f"({_type(dtype)}){number.hex()}"


def _is_float(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _is_bool(dtype: np.dtype) -> bool:
    return dtype.name == "bool"


def _type(dtype: np.dtype) -> str:
    """The C type of a value."""
    if dtype.name not in _TYPES:
        raise NotInCError(f"dtype {dtype}")
    return _TYPES[dtype.name]


def _stored(dtype: np.dtype) -> str:
    """The C type of an element in memory."""
    halves = {"bfloat16": "uint16_t", "float16": "_Float16"}
    return halves.get(dtype.name) or _type(dtype)


def _read(dtype: np.dtype, place: str) -> str:
    return f"read_bf16({place})" if dtype == jnp.bfloat16 else place


def _write(dtype: np.dtype, value: str) -> str:
    if dtype == jnp.bfloat16:
        return f"write_bf16({value})"
    return f"({_stored(dtype)})({value})"
