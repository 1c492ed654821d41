"""Does the C code of an update compute what JAX computes, for every operation?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.jaxprs.by_element import ByElement, LeafGroup, split_by_element
from jaxpar.jaxprs.evaluate import inlined
from jaxpar.offload.c_code import NotInCError, c_code
from jaxpar.offload.native import compiled

SIZE = 1000
UNARY: dict[str, Callable] = {
    "abs": jnp.abs,
    "cbrt": jnp.cbrt,
    "ceil": jnp.ceil,
    "cos": jnp.cos,
    "cube": lambda x: jax.lax.integer_pow(x, 3),
    "erf": jax.scipy.special.erf,
    "exp": lambda x: jnp.exp(x / 4),
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "finite": lambda x: jnp.where(jnp.isfinite(1 / jnp.floor(x)), x, 0),
    "floor": jnp.floor,
    "inverse square": lambda x: jax.lax.integer_pow(x, -2),
    "log": lambda x: jnp.log(jnp.abs(x)),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "logistic": jax.nn.sigmoid,
    "negative": jnp.negative,
    "rsqrt": lambda x: jax.lax.rsqrt(jnp.abs(x)),
    "sign": jnp.sign,
    "sin": jnp.sin,
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
    "square": jnp.square,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
}
BINARY: dict[str, Callable] = {
    "add": jnp.add,
    "atan2": jnp.arctan2,
    "clip": lambda x, y: jax.lax.clamp(-1.0, x, 0.5) + y,
    "compare": lambda x, y: jnp.where((x < y) & ~(x == y) | (y >= 2), x, y),
    "divide": jnp.divide,
    "integers": lambda x, y: x * (~x.astype(jnp.int32) & 1) + y,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "multiply": jnp.multiply,
    "power": lambda x, y: jnp.abs(x) ** y,
    "remainder": lambda x, y: jax.lax.rem(x, y),
    "subtract": jnp.subtract,
    "unequal": lambda x, y: jnp.where((x != y) ^ (x > y) | (x <= 0), x, y),
}
ROUNDED = {"abs", "add", "ceil", "clip", "compare", "cube", "divide", "finite", "floor"}
ROUNDED |= {"integers", "maximum", "minimum", "multiply", "negative", "sign", "sqrt"}
ROUNDED |= {"square", "subtract", "unequal"}
"""Functions that IEEE or the code defines to the bit."""


def part_of(fn: Callable, *dtypes: Any) -> ByElement:
    """A function of arrays as the update of the first one."""
    shapes = [jax.ShapeDtypeStruct((SIZE,), dtype) for dtype in dtypes]
    closed = inlined(lambda *args: [fn(*args)], *shapes)
    group = LeafGroup("leaf", (0,), (0,), tuple(range(1, len(dtypes))))
    split = split_by_element(closed, [group])
    assert split.whole == {}
    return split.parts[0]


def computed(fn: Callable, *args: np.ndarray) -> np.ndarray:
    part = part_of(fn, *(x.dtype for x in args))
    assert part.scalars == ()
    out = np.empty(SIZE, jax.eval_shape(fn, *args).dtype)
    compiled(c_code(part, None))([*args, out], [])
    return out


def drawn(seed: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SIZE).astype(dtype) * 3


def assert_near(found: np.ndarray, right: np.ndarray, name: str, dtype: Any) -> None:
    steps = 0 if name in ROUNDED else 4
    scale = np.abs(right.astype(np.float64)) + 1e-6
    far = np.abs(found.astype(np.float64) - right.astype(np.float64)) / scale
    assert np.max(far) <= steps * float(jnp.finfo(dtype).eps), name


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_array(name: str) -> None:
    x = drawn(0)
    # XLA's CPU backend has functions of its own, which are less exact.
    right = np.asarray(UNARY[name](x.astype(np.float64)), np.float64)
    assert_near(computed(UNARY[name], x), np.float32(right), name, np.float32)


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_arrays(name: str) -> None:
    x, y = drawn(0), drawn(1)
    right = np.asarray(BINARY[name](jnp.asarray(x), jnp.asarray(y)))
    assert_near(computed(BINARY[name], x, y), right, name, np.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["add", "divide", "maximum", "multiply", "subtract"])
def test_half_precision_is_rounded_where_it_is_stored(name: str, dtype: Any) -> None:
    x, y = drawn(0, dtype), drawn(1, dtype)
    exact = BINARY[name](BINARY[name](x.astype(np.float32), y), y.astype(np.float32))
    found = computed(lambda x, y: BINARY[name](BINARY[name](x, y), y), x, y)
    assert found.dtype == dtype
    assert np.array_equal(found, exact.astype(dtype))


@pytest.mark.parametrize("name", ["maximum", "minimum", "clip", "sign"])
def test_no_number_stays_none(name: str) -> None:
    x = drawn(0)
    x[::7], x[1::7], x[2::7] = np.nan, np.inf, -np.inf
    fn = {**UNARY, **BINARY}[name]
    args = [x] if name in UNARY else [x, drawn(1)]
    right = np.asarray(fn(*args))
    assert np.array_equal(computed(fn, *args), right, equal_nan=True)


def test_copy_is_the_first_output_rounded_to_nearest() -> None:
    x = drawn(0)
    x[0], x[1], x[2] = np.nan, np.inf, 1 + 2**-8  # A tie, to even.
    copy, out = np.empty(SIZE, jnp.bfloat16), np.empty(SIZE, np.float32)
    compiled(c_code(part_of(lambda x: -x, np.float32), jnp.bfloat16))(
        [x, out, copy], []
    )
    right = (-x).astype(jnp.bfloat16)
    assert np.array_equal(np.isnan(copy), np.isnan(right))
    assert np.array_equal(copy[1:], right[1:])


def test_scalars_are_read_once() -> None:
    def scaled(x, rate):
        return x * jnp.sqrt(rate)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((SIZE,), ())]
    closed = inlined(lambda *args: [scaled(*args)], *shapes)
    (part,) = split_by_element(closed, [LeafGroup("leaf", (0,), (0,))]).parts
    assert len(part.scalars) == 1
    x, out = drawn(0), np.empty(SIZE, np.float32)
    compiled(c_code(part, None))([x, out], [np.float32([1.5])])
    assert np.array_equal(out, x * np.float32(1.5))


def test_what_has_no_c_is_named() -> None:
    part = part_of(jax.scipy.special.erfinv, jnp.float32)
    with pytest.raises(NotInCError, match="erf_inv of float32"):
        c_code(part, None)
    with pytest.raises(NotInCError, match="dtype int4"):
        c_code(part_of(lambda x: x + x, jnp.int4), None)
