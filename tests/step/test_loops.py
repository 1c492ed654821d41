"""Are the parameters found that a loss slices layer by layer?"""

import jax
import jax.numpy as jnp
import pytest

from jaxpar.step.loops import is_used_whole, loops_over, read_by_layer
from tests.step.test_gather_at_use import FUNCTIONS, PLANS, SHAPES, X

FOUND = {
    "scan": [(3, ["stack"])],
    "remat dots": [(3, ["stack"])],
    "jit": [(3, ["stack"])],
    "inside and outside": [(3, ["stack"])],
    "nested scans": [(3, ["stack"])],
    "constant of a scan": [],
    "used thrice": [],
    "loops and maps": [(3, ["stack"])],
}


def traced(fn):
    leaves = [jnp.zeros(shape) for shape in SHAPES.values()]
    return jax.make_jaxpr(fn)(*leaves, X).jaxpr


@pytest.mark.parametrize("case", FOUND)
def test_loops_are_found_with_what_they_slice(case):
    jaxpr = traced(FUNCTIONS[case])
    leaves = dict(zip(jaxpr.invars[:3], PLANS, strict=True))
    found = [
        (length, [leaf.name for leaf in own])
        for length, own in loops_over(jaxpr, leaves)
    ]
    assert found == FOUND[case]


def test_a_stack_of_stacks_is_found_where_its_matrices_are_used():
    def twice(stack, head, bias, x):
        def outer(h, group):
            return jax.lax.scan(lambda h, row: (h * row, None), h, group)[0], None

        return jax.lax.scan(outer, x, stack)[0].sum()

    jaxpr = traced(twice)
    leaves = dict(zip(jaxpr.invars[:3], PLANS, strict=True))
    ((length, (leaf,)),) = loops_over(jaxpr, leaves)
    assert (length, leaf.shape) == (SHAPES["stack"][1], SHAPES["stack"][1:])


def test_a_variable_is_used_whole_unless_only_scans_slice_it():
    sliced = traced(
        lambda s, h, b, x: jax.lax.scan(lambda c, w: (c + w.sum(), None), 0.0, s)[0]
    )
    assert not is_used_whole(sliced, sliced.invars[0])
    assert not is_used_whole(sliced, sliced.invars[1]), "it is not used"
    summed = traced(lambda s, h, b, x: jax.jit(jnp.sum)(s))
    assert is_used_whole(summed, summed.invars[0])


@pytest.mark.parametrize("case", FOUND)
def test_what_is_read_by_layer_alone_is_found(case):
    leaves = [jnp.zeros(shape) for shape in SHAPES.values()]
    with_key = jax.make_jaxpr(lambda key, *args: FUNCTIONS[case](*args))
    jaxpr = with_key(jax.random.key(0), *leaves, X).jaxpr
    by_layer = {"scan", "remat dots", "jit", "nested scans"}
    right = {"stack"} if case in by_layer else set()
    assert read_by_layer(jaxpr, PLANS) == right


def test_slices_of_slices_are_not_read_by_layer():
    def twice(key, stack, head, bias, x):
        def outer(h, group):
            return jax.lax.scan(lambda h, row: (h * row, None), h, group)[0], None

        return jax.lax.scan(outer, x, stack)[0].sum()

    leaves = [jnp.zeros(shape) for shape in SHAPES.values()]
    jaxpr = jax.make_jaxpr(twice)(jax.random.key(0), *leaves, X).jaxpr
    assert read_by_layer(jaxpr, PLANS) == set()
