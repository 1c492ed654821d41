"""What does one of several losses see of the state, and what does it put back?

The state is NumPy's; the optimizers pack the parameters as one list.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.engine.focus import (
    STEP,
    Focus,
    OneOfSeveral,
    UpdateByLoss,
    focused,
    joined_state,
)
from jaxpar.step.state import TrainState, pack_state, unpack_state
from jaxpar.step.train_step import TrainStep
from jaxpar.step.update import Update

NAMES = {"a": frozenset({"one/w", "two/v"}), "b": frozenset({"two/w"})}


class Listed(Update):
    """Parameters as a list; the moments times ten."""

    def pack(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        return jax.tree.leaves(params), jax.tree.map(lambda x: x * 10, opt_state)

    def unpack(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        one, two = params
        return {"one": {"w": one}, "two": {"v": two}}, jax.tree.map(
            lambda x: x / 10, opt_state
        )

    def apply(self, *_: Any, **__: Any) -> Any:
        raise AssertionError

    def notes(self) -> tuple[str, ...]:
        return ("listed",)


class Plain(Listed):
    def pack(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        return params, opt_state

    unpack = pack


UPDATE = UpdateByLoss({"a": Listed(), "b": Plain()}, NAMES)
AVERAGES = {"slow": ("b", "two")}


def of_loss(loss: str) -> TrainState:
    """The state of one loss, before they are joined."""
    leaves = {
        "one": {"w": jnp.float32(1)},
        "two": {"v": jnp.float32(2), "w": jnp.float32(3)},
        "three": {"w": jnp.float32(4)},
        "slow": {"v": jnp.float32(2), "w": jnp.float32(3)},
    }
    own = {
        "a": {"one": leaves["one"], "two": {"v": leaves["two"]["v"]}},
        "b": {"two": {"w": leaves["two"]["w"]}},
    }[loss]
    two = {"a": {"w": leaves["two"]["w"]}, "b": {"v": leaves["two"]["v"]}}[loss]
    others = {"a": {}, "b": {"one": leaves["one"]}}[loss]
    carried = {"loss_scale": jnp.float32({"a": 8, "b": 16}[loss])}
    if loss == "b":
        carried["slow"] = {"two": {"v": jnp.float32(-2), "w": jnp.float32(-3)}}
    return TrainState(
        step=jnp.int32(0),
        params=own,
        frozen={**others, "two": two, "three": leaves["three"], "slow": leaves["slow"]},
        model_state={"one": {"mean": jnp.float32(0)}},
        opt_state={"mu": jnp.float32({"a": 5, "b": 6}[loss])},
        key=jax.random.key(3),
        carried=carried,
    )


def whole() -> TrainState:
    parts = {loss: of_loss(loss) for loss in "ab"}
    return joined_state(parts, {"one": 0, "two": 0, "three": 0})


def focus(loss: str) -> OneOfSeveral:
    index = "ab".index(loss)
    return OneOfSeveral(name=loss, index=index, update=UPDATE, averages=AVERAGES)


def equal(one: Any, other: Any) -> bool:
    same = jax.tree.map(lambda x, y: bool(np.all(x == y)), one, other)
    return all(jax.tree.leaves(same))


def test_joined_state_has_every_parameter_once_and_no_average():
    state = whole()
    assert equal(state.params, {"one": {"w": 1}, "two": {"v": 2, "w": 3}})
    assert equal(state.frozen, {"three": {"w": 4}})
    assert equal(state.opt_state, {"a": {"mu": 5}, "b": {"mu": 6}})
    assert sorted(state.carried["b"]) == ["loss_scale", "slow", STEP]


def test_packed_form_is_each_optimizers_own_and_comes_back():
    packed = pack_state(UPDATE, whole())
    assert equal(packed.params, {"a": [1.0, 2.0], "b": {"two": {"w": 3.0}}})
    assert equal(packed.opt_state, {"a": {"mu": 50.0}, "b": {"mu": 6.0}})
    assert equal(unpack_state(UPDATE, packed).params, whole().params)
    assert equal(unpack_state(UPDATE, packed).opt_state, whole().opt_state)
    assert UPDATE.unpack(packed.params, ())[1] == ()
    assert UPDATE.notes() == ("listed",)
    with pytest.raises(NotImplementedError):
        UPDATE.apply()


@pytest.mark.parametrize(
    ("loss", "params", "frozen"),
    [
        ("a", [1.0, 2.0], {"two": {"w": 3}, "three": {"w": 4}}),
        (
            "b",
            {"two": {"w": 3.0}},
            {"one": {"w": 1}, "two": {"v": 2}, "three": {"w": 4}},
        ),
    ],
)
def test_a_loss_sees_what_others_train_and_averages_as_frozen(loss, params, frozen):
    seen = focus(loss).get(pack_state(UPDATE, whole()))
    assert equal(seen.params, params)
    assert equal(seen.frozen, {**frozen, "slow": {"v": -2, "w": -3}})
    assert sorted(seen.carried) == ["loss_scale", *(["slow"] if loss == "b" else [])]
    assert float(seen.carried["loss_scale"]) == {"a": 8, "b": 16}[loss]


def test_random_numbers_are_each_losss_own():
    keys = [focus(loss).get(pack_state(UPDATE, whole())).key for loss in "ab"]
    assert not jnp.array_equal(*map(jax.random.key_data, keys))


def test_step_of_a_loss_changes_its_own_and_counts():
    packed = pack_state(UPDATE, whole())

    def update(state: TrainState, before: Any) -> tuple[TrainState, dict]:
        new = dataclasses.replace(
            state,
            step=state.step + 1,
            params=jax.tree.map(lambda x: x + before, state.params),
            frozen=jax.tree.map(lambda x: x * 0, state.frozen),
        )
        return new, {"given": jnp.float32(before)}

    step = focused(
        TrainStep(lambda state, batch: batch, update, lambda state, _: state),
        focus("b"),
    )
    new, metrics = step(packed, 7.0)
    assert float(metrics["given"]) == 7.0
    assert int(new.step) == 1
    assert int(new.carried["b"][STEP]) == 1
    assert int(new.carried["a"][STEP]) == 0
    assert equal(new.params, {"a": [1.0, 2.0], "b": {"two": {"w": 10.0}}})
    assert equal(new.frozen, packed.frozen)


def test_a_single_loss_sees_all():
    state = whole()
    assert Focus().get(state) is state
    other = of_loss("a")
    assert Focus().put(state, other) is other
    assert Focus().carried(state) is state.carried
