"""Is dependence followed exactly through calls, scans and branches?"""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

from jaxpar.jaxprs.dependence import (
    differentiable_inputs,
    of_first_inputs,
    tainted_outputs,
)


@jax.custom_vjp
def both_vjp(x, y):
    return x * 2, y * 3


both_vjp.defvjp(lambda x, y: (both_vjp(x, y), None), lambda _, ct: ct)


@jax.custom_jvp
def both_jvp(x, y):
    return x * 2, y * 3


both_jvp.defjvp(lambda primals, tangents: (both_jvp(*primals), tangents))


def carried(x, y):
    """x moves one carry, y the other; each step stacks both."""

    def body(carry, step):
        a, b = carry
        return (a + step, b * 2), (a, b)

    (a, b), (stacked_a, stacked_b) = jax.lax.scan(body, (x, y), jnp.arange(3.0))
    return a, b, stacked_a, stacked_b


def late(x, y):
    """x reaches the last carry only after two rounds."""

    def body(carry, _):
        a, b, c = carry
        return (a, a + b, b + c), None

    return jax.lax.scan(body, (x, y, y), None, length=4)[0]


def scanned_over(x, y):
    def body(carry, slices):
        return carry, (slices[0] + 1, slices[1] * 2)

    return jax.lax.scan(body, 0.0, (jnp.ones(3) * x, jnp.ones(3) * y))[1]


def constant_of_scan(x, y):
    def body(carry, _):
        return carry * x, carry

    return (*jax.lax.scan(body, 1.0, None, length=2), y)


def branched(x, y):
    return jax.lax.cond(y > 0, lambda: (x, y), lambda: (y, y))


def switched_on_x(x, y):
    return jax.lax.cond(x > 0, lambda: (y, 1.0), lambda: (y + 1, 2.0))


def looped(x, y):
    return jax.lax.fori_loop(0, 3, lambda _, both: (both[0] + 1, both[1]), (x, y))


def while_looped(x, y):
    return jax.lax.while_loop(lambda v: v[1] < 9, lambda v: (v[0], v[1] + 1), (x, y))


NO, YES = False, True
CASES = {
    "plain": (lambda x, y: (x + y, y, x, 1.0), [YES, NO, YES, NO]),
    "jit": (lambda x, y: jax.jit(lambda a, b: (b, a))(x, y), [NO, YES]),
    "remat": (lambda x, y: jax.checkpoint(lambda a, b: (b * 2, a))(x, y), [NO, YES]),
    "custom_vjp": (both_vjp, [YES, NO]),
    "custom_jvp": (both_jvp, [YES, NO]),
    "scan carry": (carried, [YES, NO, YES, NO]),
    "scan carry, late": (late, [YES, YES, YES]),
    "scan xs": (scanned_over, [YES, NO]),
    "scan const": (constant_of_scan, [YES, YES, NO]),
    "cond branch": (branched, [YES, NO]),
    "cond predicate": (switched_on_x, [YES, YES]),
    "fori_loop": (looped, [YES, NO]),
    "while_loop is one equation": (while_looped, [YES, YES]),
    "stop_gradient depends": (lambda x, y: jax.lax.stop_gradient(x), [YES]),
    "relu": (lambda x, y: (jax.nn.relu(x), jax.nn.relu(y)), [YES, NO]),
    "shape does not": (lambda x, y: jnp.float32(x.size), [NO]),
}


def wrap_nothing(fn):
    return fn


def wrap_deep(fn):
    """The case inside jit, remat, a scan's body and a branch at once."""

    def body(carry, _):
        x, y = carry
        outs = jax.checkpoint(jax.jit(fn))(x, y)
        return (x, y), outs

    def wrapped(x, y):
        def run():
            _, outs = jax.lax.scan(body, (x, y), None, length=2)
            return outs

        return jax.lax.cond(y > 1, run, run)

    return wrapped


@pytest.mark.parametrize("wrap", [wrap_nothing, wrap_deep])
@pytest.mark.parametrize("case", CASES)
def test_dependence_is_followed_to_each_output(case, wrap):
    fn, expected = CASES[case]
    jaxpr = jax.make_jaxpr(wrap(fn))(1.0, 2.0).jaxpr
    assert tainted_outputs(jaxpr, [True, False]) == expected


def test_nothing_followed_taints_nothing():
    jaxpr = jax.make_jaxpr(late)(1.0, 2.0).jaxpr
    assert tainted_outputs(jaxpr, [False, False]) == [False] * 3


def nested(x, y):
    """Of x alone, in a call and in a checkpoint, beside results of y."""
    double, both = jax.jit(lambda a, b: (2 * a, a * b))(x, y)
    return jax.checkpoint(lambda a, b: (a + 1, b))(double, both)


@pytest.mark.parametrize(
    ("fn", "numbers"),
    [
        (lambda x, y: (x * y, jnp.sin(x), y, jnp.cos(x), 2.0), [1, 3, 4]),
        (nested, [0]),
        (carried, [0, 2]),
        (branched, []),
        (late, [0]),
        # Not pruned by JAX: the call that makes the first output reads y too.
        (both_vjp, []),
        (both_jvp, []),
    ],
)
def test_outputs_of_the_first_inputs_are_computed_without_the_others(fn, numbers):
    found, alone = of_first_inputs(jax.make_jaxpr(fn)(1.0, 2.0), 1)
    assert found == numbers
    outs = fn(1.5, 2.5)
    made = core.jaxpr_as_fun(alone)(jnp.float32(1.5))
    for number, one in zip(numbers, made, strict=True):
        assert jnp.array_equal(one, outs[number])


def stopped(x, y):
    return jax.lax.stop_gradient(x) * y


def stopped_in_a_call(x, y):
    return jax.jit(stopped)(x, y)


def stopped_in_a_branch(x, y):
    return jax.lax.cond(y > 0, stopped, stopped, x, y)


def used_in_one_branch(x, y):
    return jax.lax.cond(y > 0, stopped, lambda x, y: x * y, x, y)


def counted(x, y):
    return jnp.argmax(jnp.stack([x, -x])) * y


def stopped_in_a_scan(x, y):
    return jax.lax.scan(lambda c, _: (stopped(x, c), None), y, None, length=2)[0]


def later_in_a_scan(x, y):
    """x reaches the result only after two rounds."""
    return late(x, y)[2]


def checkpointed(x, y):
    return jax.checkpoint(stopped)(x, y)


@pytest.mark.parametrize(
    ("function", "has"),
    [
        (lambda x, y: y * 2, [False, True]),
        (lambda x, y: x + y, [True, True]),
        (stopped, [False, True]),
        (stopped_in_a_call, [False, True]),
        (stopped_in_a_branch, [False, True]),
        (used_in_one_branch, [True, True]),
        (counted, [False, True]),
        (stopped_in_a_scan, [False, True]),
        (later_in_a_scan, [True, True]),
        (lambda x, y: scanned_over(x, y)[1].sum(), [False, True]),
        (lambda x, y: constant_of_scan(x, y)[0], [True, False]),
        (lambda x, y: both_vjp(x, y)[1], [False, True]),
        (checkpointed, [False, True]),
    ],
)
def test_inputs_that_an_output_has_a_gradient_of_are_found(function, has):
    jaxpr = jax.make_jaxpr(function)(2.0, 3.0).jaxpr
    assert differentiable_inputs(jaxpr, 0) == has
    moved = [bool(grad) for grad in jax.grad(function, (0, 1))(2.0, 3.0)]
    assert all(given or not own for given, own in zip(has, moved, strict=True))
