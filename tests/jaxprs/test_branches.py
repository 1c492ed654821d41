"""Does what an author says of a branch reach the jaxpr and the compiled program?"""

import jax
import jax.numpy as jnp
import pytest

from jaxpar.compiled.hlo import parse, runs_of
from jaxpar.compiled.source_lines import todays_lines
from jaxpar.jaxprs.branches import (
    alike_on_all_devices,
    conditionals_alike,
    expected,
    expected_turns,
    fraction_in,
    turns_in,
    without_fraction,
)
from jaxpar.jaxprs.evaluate import flops

SIZE, TRIPS = 32, 8
ONE = 2 * SIZE**3


def some_products(x: jax.Array, often: float | None) -> jax.Array:
    """Multiply x by itself in a loop, where it is positive."""

    def square(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x)

    def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        if often is None:
            return jax.lax.cond(x[0, 0] > 0, square, lambda x: x, x), None
        with expected(often):
            return jax.lax.cond(x[0, 0] > 0, square, lambda x: x, x), None

    return jax.lax.scan(body, x, length=TRIPS)[0]


@pytest.mark.parametrize(("often", "trips"), [(None, 8), (0.25, 2), (1.0, 8), (0.0, 0)])
def test_flops_and_runs_are_the_expected_ones(often, trips) -> None:
    x = jnp.ones((SIZE, SIZE))
    jaxpr = jax.make_jaxpr(some_products, static_argnums=1)(x, often)
    assert flops(jaxpr.jaxpr.eqns) == trips * ONE

    with todays_lines():  # Else a cached program may have the names of another.
        step = jax.jit(some_products, static_argnums=1).lower(x, often).compile()
    module = parse(step.as_text())
    runs, unknown = runs_of(module)
    (conditional,) = (
        own
        for computation in module.computations.values()
        for own in computation.instructions.values()
        if own.opcode == "conditional"
    )
    assert unknown == ()
    assert {runs[name] for name in conditional.called} == {trips}


def test_branches_may_be_said_one_by_one() -> None:
    def chosen(x: jax.Array, which: jax.Array) -> jax.Array:
        branches = [jnp.sin, lambda x: jnp.tanh(x @ x), lambda x: x @ x @ x]

        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            with expected(0.0, 0.25, 0.75):
                return jax.lax.switch(which, branches, x), None

        return jax.lax.scan(body, x, length=TRIPS)[0]

    with todays_lines():
        lowered = jax.jit(chosen).lower(jnp.ones((SIZE, SIZE)), jnp.int32(1))
        module = parse(lowered.compile().as_text())
    runs, _ = runs_of(module)
    (conditional,) = (
        own
        for computation in module.computations.values()
        for own in computation.instructions.values()
        if own.opcode == "conditional"
    )
    assert [runs[name] for name in conditional.called] == [0, 2, 6]
    assert module.taken_by(conditional) == [0.0, 0.25, 0.75]


def test_gradients_of_a_checkpointed_block_say_it_too() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda x: some_products(x, 0.25))(x).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones((SIZE, SIZE)))
    # Forward, once more, and two products backward, in a quarter of the trips.
    assert flops(jaxpr.jaxpr.eqns) == pytest.approx(4 * 2 * ONE)


def test_what_is_said_of_a_conditional_around_does_not_count() -> None:
    around = "jit(f)/while/body/jaxpar_taken_0.25/cond/branch_1_fun/"
    assert fraction_in(around + "cond") is None
    assert fraction_in(around + "jaxpar_taken_0.5/cond") == 0.5
    assert fraction_in("jaxpar_taken_1e-05/cond") == 1e-5
    assert fraction_in("branch_taken_3/cond") is None, "a user's scope"


def test_products_of_ragged_groups_are_counted() -> None:
    """Of all rows, forward and twice backward, in the part that has rows."""
    rows, kernels, sizes = jnp.ones((16, 4)), jnp.ones((2, 4, 8)), jnp.array([8, 8])

    def loss(rows: jax.Array, kernels: jax.Array) -> jax.Array:
        with expected(0.5):
            return jax.lax.ragged_dot(rows, kernels, sizes).sum()

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(rows, kernels)
    assert flops(jaxpr.jaxpr.eqns) == 3 * 2 * 16 * 4 * 8 * 0.5


@pytest.mark.parametrize("fraction", [-0.1, 1.5])
def test_a_fraction_is_one(fraction) -> None:
    with pytest.raises(ValueError, match=rf"fractions=\({fraction},\) must be"):
        expected(fraction)


def test_conditionals_whose_predicate_has_a_name_are_alike() -> None:
    def branches(x: jax.Array) -> jax.Array:
        named = alike_on_all_devices(x > 0)
        y = jax.lax.cond(named, jnp.sin, jnp.cos, x)
        y = jax.lax.switch(named.astype(int), (jnp.sin, jnp.cos), y)
        return jax.lax.cond(x > 1, jnp.tan, jnp.cos, y)

    jaxpr = jax.make_jaxpr(branches)(1.0).jaxpr
    alike = [id(eqn) for eqn in conditionals_alike(jaxpr)]
    conds = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
    assert [id(eqn) in alike for eqn in conds] == [True, True, False]


@pytest.mark.parametrize(("turns", "counted"), [(None, 1), (2.5, 2.5), (0.0, 0)])
def test_turns_of_a_loop_are_the_expected_ones(turns, counted) -> None:
    """In the jaxpr, and in the program; a loop inside counts its own."""

    def body(_: int, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 4, lambda _, x: jnp.tanh(x @ x), x)

    def some(x: jax.Array, times: jax.Array) -> jax.Array:
        if turns is None:
            return jax.lax.fori_loop(0, times, body, x)
        with expected_turns(turns):
            return jax.lax.fori_loop(0, times, body, x)

    given = jnp.ones((SIZE, SIZE)), jnp.int32(3)
    assert flops(jax.make_jaxpr(some)(*given).jaxpr.eqns) == counted * 4 * ONE
    with todays_lines():
        module = parse(jax.jit(some).lower(*given).compile().as_text())
    runs, unknown = runs_of(module)
    assert len(unknown) == (turns is None)
    assert max(runs.values()) == max(4 * counted, 1)


def test_turns_are_said_of_the_innermost_loop() -> None:
    assert turns_in("jit(f)/jvp(jaxpar_turns_2.5)/while") == 2.5
    assert turns_in("jit(f)/jaxpar_turns_2.5/while/body/while") is None


def test_scopes_are_kept_without_the_fraction() -> None:
    assert without_fraction("blocks/jaxpar_taken_0.25") == "blocks"
    assert without_fraction("jvp(jaxpar_taken_0.25)") == ""
