"""Are optimizers by name those of optax, and are their rates in the metrics?"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.optim import OPTIMIZERS, FusedOptimizer, onebit_adam, onebit_lamb, soap

PARAMS = {"w": jnp.linspace(-1, 1, 256).reshape(16, 16)}
GRADS = {"w": jnp.sin(jnp.arange(256.0)).reshape(16, 16)}
SAME = {
    "adamw": lambda s: optax.adamw(s, b2=0.95, weight_decay=0.1),
    "lion": lambda s: optax.lion(s, weight_decay=0.1),
    "lamb": lambda s: optax.lamb(s, weight_decay=0.1),
    "sgd": lambda s: optax.sgd(s, 0.9),
    "adafactor": optax.adafactor,
    "soap": lambda s: soap(s, weight_decay=0.1),
}


@pytest.mark.parametrize("name", SAME)
def test_named_optimizer_is_that_of_optax(name):
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    own, theirs = OPTIMIZERS[name].make(schedule), SAME[name](schedule)
    mine, other = own.init(PARAMS), theirs.init(PARAMS)
    for _ in range(3):
        update, mine = jax.jit(own.update)(GRADS, mine, PARAMS)
        expected, other = jax.jit(theirs.update)(GRADS, other, PARAMS)
        np.testing.assert_allclose(update["w"], expected["w"], rtol=2e-6, atol=1e-7)
    assert float(mine.hyperparams["learning_rate"]) == pytest.approx(0.08)


def test_fewer_bits_are_the_fused_optimizers():
    for name in ("adamw", "lion", "lamb"):
        found = dataclasses.replace(OPTIMIZERS[name], bits=8)
        assert isinstance(found.make(0.1), FusedOptimizer)
    with pytest.raises(ValueError, match="bits=16 must be 32"):
        dataclasses.replace(OPTIMIZERS["lion"], bits=16).make(0.1)


def test_names_are_kinds():
    assert all(each.kind == name for name, each in OPTIMIZERS.items())


@pytest.mark.parametrize("make", [onebit_adam, onebit_lamb])
def test_optimizers_in_one_bit_have_a_warm_up(make: Callable) -> None:
    name = make.__name__
    own = dataclasses.replace(OPTIMIZERS[name], freeze_step=7)
    assert own.make(0.1) == make(0.1, 7, weight_decay=0.1)
    others = {"onebit_adam", "onebit_lamb", "zero_one_adam"}
    assert set(OPTIMIZERS) - set(SAME) == others
