"""Do an optimizer's loops of matrix products compute the same, each on one shard?"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.compiled.program import read_program
from jaxpar.mesh import DATA
from jaxpar.optim.loops import has_loops, with_divided_loops

WAYS, TURNS = 8, 4
SHAPES = {
    "alone": (24, 32),
    "equal 1": (16, 32),
    "equal 2": (16, 32),
    "equal 3": (16, 32),
    "layers": (WAYS, 16, 16),
    "layers that data does not divide": (3, 16, 16),
}
BYTES = {name: 4 * math.prod(shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jaxpar.make_mesh(jaxpar.MeshShape(data=WAYS))


def turn(x: jax.Array) -> jax.Array:
    """One turn of Newton-Schulz."""
    return 1.5 * x - 0.5 * (x @ x.mT) @ x


def scanned(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (turn(x), None), x, length=TURNS)[0]


def counted(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, TURNS, lambda _, x: turn(x), x, unroll=True)


def until_still(x: jax.Array) -> jax.Array:
    """As often as a matrix needs, each another number of turns."""

    def moves(carry: tuple) -> jax.Array:
        x, before = carry
        return jnp.max(jnp.abs(x - before)) > 1e-2

    return jax.lax.while_loop(moves, lambda c: (turn(c[0]), c[0]), (x, 0 * x))[0]


def on_condition(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[..., 0, 0].sum() > -1e3, scanned, jnp.zeros_like, x)


def twice(x: jax.Array) -> jax.Array:
    return scanned(jnp.sin(jax.jit(counted)(x)))


def each(fn: Callable[[jax.Array], jax.Array]) -> Callable[[dict], dict]:
    """The function on every leaf, between other operations."""
    return lambda leaves: {
        name: 2.0 * fn(x / jnp.linalg.norm(x)) + x for name, x in leaves.items()
    }


def make_leaves() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}


def compile_on(mesh: jax.sharding.Mesh, fn: Callable[[dict], dict]) -> Any:
    """The function of leaves that are stored split by their last dim."""
    places = {
        name: NamedSharding(mesh, P(*[None] * (len(shape) - 1), DATA))
        for name, shape in SHAPES.items()
    }

    def run(leaves: dict) -> dict:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return with_divided_loops(fn, WAYS)(leaves)

    shapes = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in SHAPES.items()}
    jitted = jax.jit(run, in_shardings=(places,), out_shardings=places)
    return jitted.lower(shapes).compile(), places


EXCHANGES = {
    scanned: (2, 2, 0),
    counted: (2, 2, 0),
    until_still: (3, 2, 0),
    on_condition: (0, 2, 3),
    twice: (4, 2, 0),
}
"""Function -> how often the stack of equal leaves and the layers are exchanged, and how
many of the equal leaves are gathered: those of branches that are taken one by one."""


@pytest.mark.parametrize(
    "fn",
    [
        scanned,
        *(pytest.param(fn, marks=pytest.mark.slow) for fn in list(EXCHANGES)[1:]),
    ],
)
def test_result_is_the_same_and_matrices_move_once(mesh, fn) -> None:
    compiled, places = compile_on(mesh, each(fn))
    leaves = make_leaves()
    expected = jax.jit(each(fn))(leaves)
    found = compiled(jax.device_put(leaves, places))
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=2e-5, atol=2e-6, err_msg=name)

    stacks, layers, gathered = EXCHANGES[fn]
    communicated = read_program(compiled, mesh).communicated_bytes
    # Three leaves are filled up to a stack of as many as data has shards.
    exchanged = stacks * WAYS * BYTES["equal 1"] + layers * BYTES["layers"]
    assert communicated("all-to-all", DATA) == exchanged // WAYS
    alone = BYTES["alone"] + BYTES["layers that data does not divide"]
    assert communicated("all-gather", DATA) == alone + gathered * BYTES["equal 1"]
    assert communicated("all-reduce", DATA) < 100, "norms"


def test_branches_on_a_counter_stay_branches(mesh) -> None:
    """Else every turn would compute both."""

    def other_at_first(x: jax.Array) -> jax.Array:
        def body(i: jax.Array, x: jax.Array) -> jax.Array:
            return jax.lax.cond(i == 0, turn, lambda x: turn(turn(x)), x)

        return jax.lax.fori_loop(0, TURNS, body, x)

    shapes = [jax.ShapeDtypeStruct((16, 32), jnp.float32)] * 3
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        fn = with_divided_loops(lambda xs: [other_at_first(x) for x in xs], WAYS)
        text = str(jax.make_jaxpr(fn)(shapes))
    assert text.count("scan[") == 1, "three loops run as one"
    assert "cond[" in text
    assert "select_n" not in text


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.adamw(1e-3), False),
        (optax.adafactor(1e-3), False),
        # Its loop multiplies vectors: what is summed over data is a number.
        (optax.lbfgs(1e-3, linesearch=None), False),
        (optax.contrib.muon(1e-3), True),
        (optax.apply_if_finite(optax.contrib.muon(1e-3), 3), True),
    ],
    ids=["adamw", "adafactor", "lbfgs", "muon", "muon inside"],
)
def test_only_loops_of_matrix_products_are_found(optimizer, expected) -> None:
    params = {"w": jax.ShapeDtypeStruct((16, 32), jnp.float32)}
    state = jax.eval_shape(optimizer.init, params)
    jaxpr = jax.make_jaxpr(optimizer.update)(params, state, params).jaxpr
    assert has_loops(jaxpr) == expected
