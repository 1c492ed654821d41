"""Which outputs of a traced call are state that depends on examples?

``fn(key, param, state, step, rows) -> (loss, state)``, of two leaves of state.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxpar.engine.coupled_state import check_uncoupled, coupled_state

ROWS, NUMBER, DRAWS = "the rows of the batch", "the number of rows", "random numbers"
KEY = jax.random.key(0)


def jaxpr_of(change, rows: int):
    def fn(key, param, state, step, x):
        loss = (x * param).sum() + jax.random.uniform(key)
        return loss, change(key, param, state, step, x)

    given = KEY, 2.0, {"a": 1.0, "b": jnp.zeros(3)}, 0, jnp.ones(rows)
    return jax.make_jaxpr(fn)(*given).jaxpr


def of_b(b):
    """A change of leaf b alone."""
    return lambda key, param, state, step, x: (
        state | {"b": state["b"] + b(key, param, state["a"], step, x)}
    )


def scanned(key, param, a, step, x):
    """Rows are carried beside what is wanted."""

    def body(carry, _):
        rows, own = carry
        return (rows * param, own * param), None

    return jax.lax.scan(body, (x, a), None, length=3)[0][1]


CASES = {
    "nothing changes": (lambda key, param, state, step, x: state, {}),
    "count": (of_b(lambda *_: 1.0), {}),
    "parameters and other state": (of_b(lambda key, param, a, step, x: param * a), {}),
    "number of the step": (of_b(lambda key, param, a, step, x: step), {}),
    "beside rows in a loop": (of_b(scanned), {}),
    "beside rows under remat": (of_b(jax.checkpoint(scanned)), {}),
    "rows": (of_b(lambda key, param, a, step, x: x.mean()), {"b": ROWS}),
    "rows without a gradient": (
        of_b(lambda key, param, a, step, x: jax.lax.stop_gradient(x).max()),
        {"b": ROWS},
    ),
    "draws": (
        of_b(lambda key, param, a, step, x: jax.random.normal(key)),
        {"b": DRAWS},
    ),
    "number of rows": (of_b(lambda key, param, a, step, x: x.shape[0]), {"b": NUMBER}),
    "both": (
        lambda key, param, state, step, x: {
            "a": state["a"] + x.size,
            "b": state["b"] + x[:3],
        },
        {"a": NUMBER, "b": ROWS},
    ),
}


def found(change, *, twice=True):
    jaxpr = jaxpr_of(change, 4)
    of_twice = (lambda: jaxpr_of(change, 8)) if twice else lambda: None
    return coupled_state(jaxpr, ["a", "b"], [False, True], of_twice)


@pytest.mark.parametrize("case", CASES)
def test_state_is_coupled_by_what_it_depends_on(case):
    change, expected = CASES[case]
    assert found(change) == expected


def test_state_that_changes_is_coupled_where_twice_the_rows_fail():
    assert found(of_b(lambda *_: 1.0), twice=False) == {"b": NUMBER}
    assert found(CASES["nothing changes"][0], twice=False) == {}


def test_coupled_state_is_refused_with_its_reason():
    check_uncoupled({})
    message = (
        r"depends on examples: a \(the number of rows\), b \(the rows of the batch\);"
    )
    with pytest.raises(ValueError, match=message):
        check_uncoupled({"a": NUMBER, "b": ROWS})
