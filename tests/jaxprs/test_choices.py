"""Is it found which iterations of a scan do nothing, and what the others do?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jaxpar.jaxprs.branches import alike_on_all_devices, expected
from jaxpar.jaxprs.choices import has_choices, without_choice

LENGTH, WIDTH = 5, 4
FLAGS = jnp.array([True, False, False, True, True])


def given() -> tuple[jax.Array, dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    stacks = {
        "w": jnp.asarray(rng.normal(size=(LENGTH, WIDTH)), jnp.float32),
        "state": jnp.arange(LENGTH, dtype=jnp.float32),
        "flag": FLAGS,
    }
    return jnp.ones(WIDTH), stacks


def block(h: jax.Array, own: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jnp.sin(h * own["w"]), own["state"] + 1


def some(h: jax.Array, stacks: dict[str, jax.Array]) -> Any:
    def body(h: jax.Array, own: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        with expected(0.6):
            flag = alike_on_all_devices(own["flag"])
            return jax.lax.cond(flag, lambda: block(h, own), lambda: (h, own["state"]))

    return jax.lax.scan(body, h, stacks)


def scan_in(fn: Callable[..., Any], *args: Any) -> core.JaxprEqn:
    eqns = jax.make_jaxpr(fn)(*args).jaxpr.eqns
    return next(eqn for eqn in eqns if eqn.primitive.name == "scan")


def test_condition_and_what_is_done_are_separated() -> None:
    h, stacks = given()
    scan, choice = without_choice(scan_in(some, h, stacks))
    assert choice is not None
    assert choice.fraction == 0.6
    xs = [stacks[name] for name in sorted(stacks)]
    np.testing.assert_array_equal(choice.of_all([], xs), FLAGS)
    assert choice.passed == {0: sorted(stacks).index("state")}
    assert choice.reads == ((), (True, False, False))
    assert "cond" not in str(scan.params["jaxpr"])
    one = {name: x[1] for name, x in stacks.items()}
    after, moved = core.jaxpr_as_fun(scan.params["jaxpr"])(h, *(x[1] for x in xs))
    np.testing.assert_allclose(after, block(h, one)[0])
    assert moved == one["state"] + 1


def test_condition_may_read_constants_and_draw() -> None:
    h, _ = given()
    key = jax.random.key(3)

    def drawn(number: Any) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, number))

    def fn(h: jax.Array, key: jax.Array, numbers: jax.Array) -> jax.Array:
        def body(h: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            flag = jax.random.bernoulli(jax.random.fold_in(key, number))
            flag = alike_on_all_devices(flag)
            return jax.lax.cond(flag, lambda: h * 2, lambda: h), None

        return jax.lax.scan(body, h, numbers)[0]

    numbers = jnp.arange(40)
    _, choice = without_choice(scan_in(fn, h, key, numbers))
    assert choice is not None
    found = choice.of_all([key], [numbers])
    np.testing.assert_array_equal(found, [drawn(n) for n in range(40)])
    assert 0 < found.sum() < 40


def not_named(h: jax.Array, own: dict[str, jax.Array]) -> Any:
    return jax.lax.cond(own["flag"], lambda: block(h, own), lambda: (h, own["state"]))


def of_the_carry(h: jax.Array, own: dict[str, jax.Array]) -> Any:
    flag = alike_on_all_devices(h.sum() > 0)
    return jax.lax.cond(flag, lambda: block(h, own), lambda: (h, own["state"]))


def changes_the_carry(h: jax.Array, own: dict[str, jax.Array]) -> Any:
    flag = alike_on_all_devices(own["flag"])
    return jax.lax.cond(flag, lambda: block(h, own), lambda: (h + 1, own["state"]))


def returns_a_constant(h: jax.Array, own: dict[str, jax.Array]) -> Any:
    flag = alike_on_all_devices(own["flag"])
    return jax.lax.cond(flag, lambda: block(h, own), lambda: (h, jnp.float32(0)))


@pytest.mark.parametrize(
    "body", [not_named, of_the_carry, changes_the_carry, returns_a_constant]
)
def test_a_scan_that_does_something_in_every_iteration_is_left_as_it_is(body) -> None:
    h, stacks = given()
    scan = scan_in(lambda h, stacks: jax.lax.scan(body, h, stacks), h, stacks)
    assert without_choice(scan) == (scan, None)


def test_choices_are_found_inside_calls() -> None:
    h, stacks = given()
    assert has_choices(jax.make_jaxpr(jax.jit(some))(h, stacks).jaxpr)
    plain = jax.make_jaxpr(lambda h, s: jax.lax.scan(block, h, s))(h, stacks)
    assert not has_choices(plain.jaxpr)
