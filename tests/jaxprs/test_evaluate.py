"""Are operations counted as by hand, wherever in a program they stand?"""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import source_info_util
from jax.sharding import PartitionSpec as P

from jaxpar.jaxprs.evaluate import bind, flops, flops_by_scope, inlined
from jaxpar.mesh import MeshShape, make_mesh

ROWS, WIDTH, OUT = 4, 8, 16
X, W = jnp.ones((ROWS, WIDTH)), jnp.ones((WIDTH, OUT))
ONE = 2 * ROWS * WIDTH * OUT


def there_and_back(x, w):
    return x @ w @ w.T


def looped(x, w):
    return jax.lax.scan(lambda x, _: (there_and_back(x, w), None), x, length=5)[0]


def until(x, w):
    return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: there_and_back(x, w), x)


def branching(x, w):
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: there_and_back(x, w) @ w)


def on_shards(x, w):
    """Every device has its rows; inside, its columns."""

    def inner(x, w):
        return jax.shard_map(
            jnp.matmul,
            in_specs=(P(), P(None, "tensor")),
            out_specs=P(None, "tensor"),
            axis_names={"tensor"},
        )(x, w)

    mesh = make_mesh(MeshShape(data=2, tensor=2), jax.devices()[:4])
    outer = jax.shard_map(
        inner,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        axis_names={"data"},
    )
    return outer(x, w)


def gradients(x, w):
    return jax.grad(lambda w: jnp.sum(jax.checkpoint(there_and_back)(x, w)))(w)


@pytest.mark.parametrize(
    ("program", "products"),
    [
        (jnp.matmul, 1),
        (lambda x, w: jnp.tanh(x + 1) * w.sum(), 0),
        (jax.jit(there_and_back), 2),
        (looped, 2 * 5),
        (until, 2),
        (branching, 3),
        (on_shards, 1),
        # Forwards; the first again; by w through both, and by the first's output.
        (gradients, 2 + 1 + 3),
    ],
)
def test_products_are_counted_as_often_as_they_run(program, products):
    traced = jax.jit(program).trace(X, W)
    assert flops(traced.jaxpr.eqns) == products * ONE


def test_batched_product_counts_for_every_batch():
    many = jax.make_jaxpr(lambda x: jnp.einsum("bqd,bkd->bqk", x, x))(
        jnp.ones((3, 5, 7))
    )
    assert flops(many.eqns) == 2 * 3 * 5 * 5 * 7


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_counts_its_kernel_at_every_output(groups):
    image, kernel = jnp.ones((2, 4, 10, 10)), jnp.ones((6, 4 // groups, 3, 3))

    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", feature_group_count=groups
        )

    found = flops(jax.make_jaxpr(convolve)(image, kernel).eqns)
    assert found == 2 * (2 * 6 * 100) * (4 // groups * 3 * 3)


def test_equation_bound_again_keeps_the_line_that_it_was_traced_at():
    def doubled(x):
        return 2 * x

    (eqn,) = jax.make_jaxpr(doubled)(1.0).eqns
    (again,) = jax.make_jaxpr(lambda x: bind(eqn, [2.0, x]))(1.0).eqns
    line = source_info_util.summarize(again.source_info)
    assert line == source_info_util.summarize(eqn.source_info)
    assert "doubled" in line


def scoped(x, w):
    def step(x, _):
        with jax.named_scope("block"):
            return jax.checkpoint(there_and_back)(x, w), None

    x = jax.lax.scan(step, x, length=5)[0]
    with jax.named_scope("head"):
        return x @ w


def test_flops_are_counted_by_scope():
    assert flops_by_scope(jax.make_jaxpr(scoped)(X, W).jaxpr.eqns) == {
        "//block/": 10 * ONE,
        "/head": ONE,
    }


def test_inlined_equations_are_in_the_scope_of_the_call():
    def fn(x, w):
        with jax.named_scope("lin"):
            return jax.checkpoint(there_and_back)(x, w)

    eqns = inlined(fn, X, W).jaxpr.eqns
    assert {str(eqn.source_info.name_stack) for eqn in eqns} == {"lin"}
