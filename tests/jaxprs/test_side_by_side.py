"""Are two calls computed side by side, with one scan for both?"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.jaxprs.evaluate import equations
from jaxpar.jaxprs.side_by_side import side_by_side

STACK = jnp.arange(12.0).reshape(3, 2, 2) / 10
ROWS = jnp.array([[1.0, -2.0], [0.5, 3.0]]), jnp.array([[2.0, 1.0], [-1.0, 0.25]])


def layers(stack: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.tanh(x @ (kernel * 2.0))
        return y, y.sum()

    return jax.lax.scan(layer, x, stack)


def with_remat(stack: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.checkpoint(layers)(stack, x)


def with_jit(stack: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.jit(layers)(stack, x)


def of_weights_alone(stack: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    norms = jax.lax.scan(lambda total, k: (total + jnp.sum(k), k * k), 0.0, stack)
    return x * norms[0], norms[1]


def reversed_with_counts(stack: jax.Array, x: jax.Array) -> tuple:
    def layer(carry: tuple, kernel: jax.Array) -> tuple[tuple, jax.Array]:
        x, number = carry
        return (x @ kernel + number, number + 1), kernel.sum()

    (x, number), sums = jax.lax.scan(layer, (x, jnp.int32(0)), stack, reverse=True)
    return x, number, sums


CASES: dict[str, Callable] = {
    "layers": layers,
    "in a checkpoint": with_remat,
    "in a jit": with_jit,
    "of the weights alone": of_weights_alone,
    "with a count, in reverse": reversed_with_counts,
}


def both(fn: Callable, stack: Any, first: Any, second: Any) -> tuple[list, list]:
    closed = jax.make_jaxpr(fn)(stack, first)
    return side_by_side(closed, [stack, first], [stack, second])


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_two_calls(case: str) -> None:
    fn = CASES[case]

    def total(found: Any) -> jax.Array:
        return sum(jnp.sum(x * x) for x in jax.tree.leaves(found))

    def ours(stack: jax.Array, rows: tuple) -> jax.Array:
        return total(both(fn, stack, *rows))

    def right(stack: jax.Array, rows: tuple) -> jax.Array:
        return total([jax.tree.leaves(fn(stack, x)) for x in rows])

    found, expected = (
        jax.value_and_grad(f, argnums=(0, 1))(STACK, ROWS) for f in (ours, right)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected
    )


@pytest.mark.parametrize("case", CASES)
def test_one_scan_computes_both(case: str) -> None:
    made = jax.make_jaxpr(functools.partial(both, CASES[case]))(STACK, *ROWS)
    scans = [e for e in equations(made.jaxpr) if e.primitive.name == "scan"]
    assert len(scans) == 1


def test_what_both_share_is_computed_once() -> None:
    made = jax.make_jaxpr(functools.partial(both, layers))(STACK, *ROWS)
    names = [e.primitive.name for e in equations(made.jaxpr)]
    assert names.count("dot_general") == 2
    assert names.count("mul") == 1, "the kernel is scaled once"
