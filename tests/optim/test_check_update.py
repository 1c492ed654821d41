"""Is an update that breaks its interface refused before anything compiles, by name?"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.optim import Update, UpdateSpec, fused_adamw
from jaxpar.optim.make_update import make_update
from tests.optim.sharded_params import leaf_shardings, make_params, mesh
from tests.optim.sign_momentum import SignMomentum, SignUpdate

RIGHT = SignMomentum(0.1)


@dataclasses.dataclass(frozen=True)
class Makes:
    """An optimizer whose `make_update` returns what it is given."""

    update: Any

    def init(self, params: Any) -> Any:
        return RIGHT.init(params)

    def make_update(self, spec: UpdateSpec) -> Any:
        del spec
        return self.update


def make(optimizer: Any) -> Update:
    params = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make_params()))
    shapes = params, jax.eval_shape(optimizer.init, params)
    spec = UpdateSpec(leaf_shardings(), mesh(), *shapes, jnp.dtype(jnp.bfloat16))
    return make_update(optimizer, spec)


def replaced(**methods: Any) -> Any:
    """`SignUpdate` with other methods."""
    return Makes(type("Wrong", (SignUpdate,), methods)(RIGHT))


def wide(self, grads, params, opt_state, **given):
    stepped = SignUpdate.apply(self, grads, params, opt_state, **given)
    params, opt_state, metrics = stepped
    return params, self.unpack(params, opt_state)[1], metrics


def forgetful(self, grads, params, opt_state, **given):
    params, opt_state, metrics = SignUpdate.apply(
        self, grads, params, opt_state, **given
    )
    return params, {"momentum": opt_state["momentum"]}, metrics


def listed(self, grads, params, opt_state, **given):
    params, opt_state, metrics = SignUpdate.apply(
        self, grads, params, opt_state, **given
    )
    return tuple(params.values()), opt_state, metrics


def split_bias(self, params, opt_state):
    return {**params, "bias": NamedSharding(mesh(), P("data"))}, opt_state


def without_bias(self, params, opt_state):
    return {"blocks": params["blocks"], "kernel": params["kernel"]}, opt_state


WRONG = {
    "apply changes a dtype": (
        {"apply": wide},
        r"Wrong\.apply returns leaf opt_state/momentum/bias as float32\[6\], but it "
        r"takes bfloat16\[6\]",
    ),
    "apply drops a leaf": (
        {"apply": forgetful},
        r"Wrong\.apply returns other leaves than it takes: new \[\], missing "
        r"\['opt_state/count'\]",
    ),
    "apply returns another tree": (
        {"apply": listed},
        r"Wrong\.apply returns other leaves than it takes: new \['params/0'",
    ),
    "unpack keeps bf16": (
        {"unpack": lambda self, params, opt_state: (params, opt_state)},
        r"Wrong\.unpack returns leaf opt_state/momentum/bias as bfloat16\[6\], but "
        r"`pack` took float32\[6\]",
    ),
    "compute_params drops one": (
        {"compute_params": lambda self, params: {"bias": params["bias"]}},
        r"Wrong\.compute_params returns other leaves than the model has: .*missing "
        r"\['params/blocks', 'params/kernel'\]",
    ),
    "shardings lack a leaf": (
        {"shardings": without_bias},
        r"Wrong\.shardings returns other leaves than the packed arrays have: new \[\], "
        r"missing \['params/bias'\]",
    ),
    "shardings do not divide": (
        {"shardings": split_bias},
        r"Wrong\.shardings returns NamedSharding.* for leaf params/bias of shape "
        r"\(6,\); it must be a NamedSharding whose axes divide the leaf",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_update_that_breaks_its_promise_raises(case, compiled):
    methods, message = WRONG[case]
    with pytest.raises(ValueError, match=rf"optimizer: {message}"):
        make(replaced(**methods))
    assert compiled == []


def test_what_is_not_an_update_raises():
    message = (
        "optimizer: its make_update returned a dict, which is not an update; derive "
        r"its class from jaxpar\.optim\.Update, and give it apply"
    )
    with pytest.raises(TypeError, match=message):
        make(Makes({}))


@pytest.mark.parametrize(
    "optimizer", [RIGHT, fused_adamw(0.1), fused_adamw(0.1, bits=8)]
)
def test_update_that_keeps_it_is_taken(optimizer, compiled):
    assert isinstance(make(optimizer), Update)
    assert compiled == []


def test_defaults_are_those_of_a_packed_state_that_is_the_logical_one():
    class Plain(Update):
        def apply(self, grads, params, opt_state, **given):
            del grads, given
            return params, opt_state, {}

    update = make(Makes(Plain()))
    assert update.pack("params", "state") == ("params", "state")
    assert update.with_shardings(leaf_shardings(zero=0)) is update
    assert update.notes() == ()


@pytest.mark.usefixtures("unchecked_types")
def test_reduction_that_is_none_is_refused_by_name():
    said = r"Wrong\.reduction is 'int8', which is not a reduction; derive"
    with pytest.raises(TypeError, match=said):
        make(replaced(reduction="int8"))
