"""Are a function's random draws found, wherever they are, and can they be replaced?

A replaced draw of bits gives ones, so that what the function makes of them is known.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.jaxprs.draws import Draw, find_draws, redrawn

KEY = jax.random.key(0)


def bits(key: jax.Array) -> jax.Array:
    return jax.random.bits(key, (2,), jnp.uint32)


def plain(key, x):
    return bits(key) + x


def in_jit(key, x):
    return jax.jit(plain)(key, x)


def in_checkpoint(key, x):
    return jax.checkpoint(plain)(key, x)


def in_scan(key, x):
    def body(carry, factor):
        return carry + factor * bits(key), carry

    return jax.lax.scan(body, x, jnp.arange(3, dtype=jnp.uint32), reverse=True)


def in_while(key, x):
    """The condition has a constant of its own, and the body another."""
    limit = x[0] + 5

    def body(carry):
        return carry[0] + 1, carry[1] + bits(key)

    return jax.lax.while_loop(lambda carry: carry[0] < limit, body, (jnp.uint32(0), x))


def in_cond(key, x):
    def drawn(x):
        return x + bits(key)

    return jax.lax.cond(x[0] > 0, drawn, lambda x: 2 * x, x)


@jax.custom_jvp
def custom(key, x):
    return plain(key, x)


custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[1]))

FUNCTIONS = {
    "plain": plain,
    "jit": in_jit,
    "checkpoint": in_checkpoint,
    "scan": in_scan,
    "while": in_while,
    "cond": in_cond,
}


def draws_of(fn: Any) -> list[Draw]:
    closed = jax.make_jaxpr(fn)(KEY, jnp.ones(2, jnp.uint32))
    found = find_draws(closed.jaxpr)
    return [draw for draw in found if draw.eqn.primitive.name == "random_bits"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_draw_is_found_once_with_where_it_is(name):
    (draw,) = draws_of(FUNCTIONS[name])
    assert draw.shape == (2,)
    assert draw.is_in_while == (name == "while")
    assert not draw.is_hidden
    assert draw.lengths == ((3,) if name == "scan" else ())
    assert draw.is_threefry
    assert "test_draws.py" in draw.where


def test_draw_inside_a_custom_derivative_is_hidden():
    (draw,) = draws_of(custom)
    assert draw.is_hidden


def test_lengths_of_nested_scans_are_the_outermost_first():
    def fn(key, x):
        def outer(carry, _):
            def inner(carry, _):
                return carry + bits(key), None

            return jax.lax.scan(inner, carry, length=3)[0], None

        return jax.lax.scan(outer, x, length=5)[0]

    (draw,) = draws_of(fn)
    assert draw.lengths == (5, 3)


def test_keys_that_are_derived_are_draws_and_other_generators_are_told_apart():
    def fn(key):
        return jax.random.split(jax.random.fold_in(key, 1), 3)

    found = find_draws(jax.make_jaxpr(fn)(KEY).jaxpr)
    names = [draw.eqn.primitive.name for draw in found]
    assert names == ["random_fold_in", "random_split"]
    assert [draw.shape for draw in found] == [(), (3,)]
    other = jax.random.key(0, impl="rbg")
    (draw,) = find_draws(jax.make_jaxpr(bits)(other).jaxpr)
    assert not draw.is_threefry


def evaluated(fn: Any, x: jax.Array, rule: Any) -> list:
    closed = jax.make_jaxpr(fn)(KEY, x)
    return redrawn(closed, [KEY, x], rule)


def ones(draw: Draw, ins: Any) -> Any:
    return [jnp.ones(draw.shape, jnp.uint32)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rule_that_leaves_draws_changes_nothing(name):
    x = jnp.array([1, 7], jnp.uint32)
    got = evaluated(FUNCTIONS[name], x, lambda draw, ins: None)
    right = jax.tree.leaves(FUNCTIONS[name](KEY, x))
    for leaf, other in zip(got, right, strict=True):
        np.testing.assert_array_equal(leaf, other)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("plain", [[2, 8]]),
        ("jit", [[2, 8]]),
        ("checkpoint", [[2, 8]]),
        # Factors 2, 1, 0, from the last on; the values before each step.
        ("scan", [[4, 10], [[4, 10], [3, 9], [1, 7]]]),
        # Six steps, for the limit is 1 + 5.
        ("while", [6, [7, 13]]),
        ("cond", [[2, 8]]),
    ],
)
def test_rule_gives_the_bits_wherever_the_draw_is(name, right):
    got = evaluated(FUNCTIONS[name], jnp.array([1, 7], jnp.uint32), ones)
    for leaf, other in zip(got, right, strict=True):
        np.testing.assert_array_equal(leaf, other)


def test_branch_that_is_not_taken_draws_nothing():
    got = evaluated(in_cond, jnp.array([0, 7], jnp.uint32), ones)
    np.testing.assert_array_equal(got[0], [0, 14])


def test_hidden_draw_stays_as_it_was_traced():
    def refuse(draw: Draw, ins: Any) -> Any:
        raise AssertionError("the rule is not asked")

    x = jnp.ones(2, jnp.uint32)
    (got,) = evaluated(custom, x, refuse)
    np.testing.assert_array_equal(got, plain(KEY, x))


def test_constant_result_is_an_array():
    got = evaluated(lambda key, x: (3, x), jnp.ones(2, jnp.uint32), ones)
    assert isinstance(got[0], jax.Array)
    assert int(got[0]) == 3


def split_for_nobody(key, x):
    """As a scan over layers without dropout, each of which gets a key."""
    return jax.lax.scan(lambda x, key: (x + 1, None), x, jax.random.split(key, 3))[0]


def split_and_drawn(key, x):
    return jax.lax.scan(lambda x, key: (x + bits(key), None), x, jax.random.split(key))


def split_and_read(key, x):
    return x + jax.random.key_data(jax.random.split(key))[0]


def split_and_returned(key, x):
    return x, jax.random.split(key)


@pytest.mark.parametrize(
    ("fn", "found"),
    [
        (split_for_nobody, []),
        (split_and_drawn, ["random_split", "random_bits"]),
        (split_and_read, ["random_split"]),
        (split_and_returned, ["random_split"]),
    ],
)
def test_keys_that_no_number_is_made_of_are_no_draws(fn, found):
    jaxpr = jax.make_jaxpr(fn)(KEY, jnp.ones(2, jnp.uint32)).jaxpr
    assert [draw.eqn.primitive.name for draw in find_draws(jaxpr)] == found
