"""Does every `Update` keep what the interface promises? Members against cases."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jaxpar.mesh import on_abstract_mesh
from jaxpar.optim import fused_lamb, fused_lion
from jaxpar.optim.make_update import make_update
from jaxpar.step.update import Update, UpdateSpec
from tests.optim.sharded_params import (
    SHAPES,
    leaf_shardings,
    make_params,
    mesh,
    placed,
)
from tests.optim.sign_momentum import SignMomentum

MEMBERS = {
    "adamw": optax.chain(optax.clip(1.0), optax.adamw(0.1)),
    "muon": contrib.muon(0.1),
    "fused lion": fused_lion(0.1),
    "fused lamb": fused_lamb(0.1, bits=8),
    "a user's": SignMomentum(0.1),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """An update, a logical state where it is stored, and the packed one."""

    optimizer: Any
    update: Update
    logical: Any
    packed: Any


@functools.cache
def make_case(name: str) -> Case:
    optimizer = MEMBERS[name]
    params = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make_params()))
    shapes = params, jax.eval_shape(optimizer.init, params)
    given = leaf_shardings(), mesh(), *shapes, jnp.dtype(jnp.bfloat16)
    update = make_update(optimizer, UpdateSpec(*given))
    logical = logical_state(optimizer, zero=1)
    return Case(optimizer, update, logical, update.pack(*logical))


def logical_state(optimizer: Any, zero: int) -> Any:
    opt_state = jax.jit(optimizer.init)(make_params())
    return placed(make_params(), zero), placed(opt_state, zero)


@pytest.fixture(params=MEMBERS)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


def are_equal(tree: Any, other: Any) -> bool:
    """To the bit, in the same structure."""
    tree, other = jax.device_get((tree, other))
    return jax.tree.all(jax.tree.map(np.array_equal, tree, other))


def test_member_has_the_interface(case):
    assert isinstance(case.update, Update)


def test_unpack_undoes_pack(case):
    """To the bit: codes of 8 bits have a code for zero, which all moments are."""
    assert are_equal(case.update.unpack(*case.packed), case.logical)


def test_shardings_are_those_of_the_packed_state(case):
    told = case.update.shardings(*jax.tree.map(lambda x: x.sharding, case.logical))
    assert jax.tree.structure(told) == jax.tree.structure(case.packed)
    for place, leaf in zip(*map(jax.tree.leaves, (told, case.packed)), strict=True):
        assert place.is_equivalent_to(leaf.sharding, leaf.ndim)


def test_parameters_to_compute_with_have_the_names_and_shapes(case):
    computed = case.update.compute_params(case.packed[0])
    assert {name: leaf.shape for name, leaf in computed.items()} == SHAPES
    for name, leaf in make_params().items():
        np.testing.assert_allclose(computed[name], leaf, rtol=2**-8)


def test_packed_gradients_have_the_same_norm(case):
    right = np.sqrt(sum(np.sum(np.square(x)) for x in make_params(3).values()))
    packed = jax.jit(case.update.pack_grads)(placed(make_params(3)))
    squares = [np.sum(np.square(x)) for x in jax.tree.leaves(jax.device_get(packed))]
    assert np.sqrt(sum(squares)) == pytest.approx(right, rel=1e-6)


def test_step_changes_the_state_only_if_it_is_applied(case):
    @jax.jit
    def step(grads, packed, applied):
        grads = case.update.pack_grads(grads)
        given = {"factor": jnp.float32(1), "loss": jnp.float32(1)}
        with on_abstract_mesh(mesh()):
            return case.update.apply(grads, *packed, **given, applied=applied)[:2]

    for applied in (False, True):
        after = step(placed(make_params(3)), case.packed, jnp.bool_(applied))
        assert jax.tree.structure(after) == jax.tree.structure(case.packed)
        assert are_equal(after, case.packed) != applied


def test_other_leaf_shardings_pack_otherwise_and_leave_the_first_alone(case):
    other = case.update.with_shardings(leaf_shardings(zero=0))
    assert type(other) is type(case.update)
    whole = logical_state(case.optimizer, zero=0)
    assert are_equal(other.unpack(*other.pack(*whole)), case.logical)
    assert are_equal(case.update.unpack(*case.packed), case.logical)
