"""Which `Update` does an optimizer get?"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.optim import UpdateSpec, fused_adamw
from jaxpar.optim.fused_update import FusedUpdate
from jaxpar.optim.make_update import make_update
from jaxpar.optim.optax_update import OptaxUpdate
from tests.optim.sharded_params import leaf_shardings, make_params, mesh
from tests.optim.sign_momentum import SignMomentum, SignUpdate


def update_of(optimizer: Any, on: Any = None) -> Any:
    params = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make_params()))
    shapes = params, jax.eval_shape(optimizer.init, params)
    given = leaf_shardings(), on or mesh(), *shapes, jnp.dtype(jnp.bfloat16)
    return make_update(optimizer, UpdateSpec(*given))


def test_fused_optimizer_updates_buckets():
    optimizer = fused_adamw(0.1)
    update = update_of(optimizer)
    assert isinstance(update, FusedUpdate)
    assert update.optimizer is optimizer
    assert update.compute_dtype == jnp.bfloat16
    assert update.buckets.leaf_shardings == leaf_shardings()


@pytest.mark.parametrize(
    ("optimizer", "extras", "loops_over"),
    [
        (optax.adamw(0.1), (), 1),
        (optax.chain(optax.adam(0.1), contrib.reduce_on_plateau()), ("value",), 1),
        (contrib.muon(0.1), (), 4),
    ],
    ids=["adamw", "plateau", "muon"],
)
def test_optax_transformation_gets_what_it_takes(optimizer, extras, loops_over):
    """Loops of matmuls, such as Muon's, are divided among four data shards."""
    update = update_of(optimizer)
    assert isinstance(update, OptaxUpdate)
    assert set(extras) <= set(update.extras)
    assert update.loops_over == loops_over


def test_optimizer_that_makes_its_update_is_asked_for_it():
    update = update_of(SignMomentum(0.1))
    assert update == SignUpdate(SignMomentum(0.1))


def test_loops_are_not_divided_without_data_shards():
    alone = make_mesh(MeshShape(data=1, tensor=8))
    assert update_of(contrib.muon(0.1), alone).loops_over == 1


def test_transformation_that_takes_nothing_else_gets_nothing_else():
    assert update_of(optax.sgd(0.1)).extras in ((), ("value", "grad"))
    plain = optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, s))
    assert update_of(plain).extras == ()


def test_update_that_a_step_can_not_make_raises():
    search = optax.scale_by_backtracking_linesearch(3)
    with pytest.raises(ValueError, match=r"optimizer: its update needs .*value_fn"):
        update_of(search)
