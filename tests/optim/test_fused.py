"""Does a fused optimizer hold optax's state, and refuse numbers that make no sense?"""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxpar.optim import fused_adamw, fused_lamb, fused_lion
from kernels_pallas.fused_optimizers import AdamW, Lion

PARAMS = {"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)}
PAIRS = {
    "adamw": (fused_adamw, optax.adamw),
    "lamb": (fused_lamb, optax.lamb),
    "lion": (fused_lion, optax.lion),
}


def first_step(optimizer: Any) -> Any:
    """Its updates and its state."""

    @jax.jit
    def step(params: Any) -> Any:
        grads = jax.tree.map(lambda x: x + 0.5, params)
        return optimizer.update(grads, optimizer.init(params), params)

    return step(PARAMS)


@pytest.mark.parametrize("name", PAIRS)
def test_defaults_are_optaxs(name):
    """One step from the same gradients: the same bits, so the same numbers."""
    fused, plain = (make(0.1) for make in PAIRS[name])
    right = first_step(plain)
    with pytest.warns(UserWarning, match="inside another transformation"):
        got = first_step(fused)
    assert jax.tree.structure(got) == jax.tree.structure(right)
    assert jax.tree.all(jax.tree.map(np.array_equal, got, right))


def test_rule_has_the_numbers_that_are_given():
    given = {"b1": 0.8, "b2": 0.95, "eps": 1e-3, "eps_root": 1e-5}
    assert fused_adamw(0.1, **given).rule == AdamW(**given)
    assert fused_lamb(0.1, **given).rule == AdamW(**given, trust_ratio=True)
    assert fused_lion(0.1, 0.8, 0.95).rule == Lion(0.8, 0.95)


def test_equal_transformation_has_the_numbers_that_are_given():
    mask = {"w": True, "b": False}
    given = {"weight_decay": 0.5, "mask": mask, "b1": 0.8}
    fused, plain = fused_adamw(0.1, **given).equal, optax.adamw(0.1, **given)
    right, got = first_step(plain), first_step(fused)
    assert jax.tree.all(jax.tree.map(np.array_equal, got, right))


def test_schedule_and_mask_are_kept_as_they_are():
    schedule = optax.linear_schedule(0.0, 1.0, 10)
    made = fused_lion(schedule, mask=PARAMS, bits=8)
    assert made.learning_rate is schedule
    assert made.mask is PARAMS
    assert (made.bits, made.weight_decay) == (8, 1e-3)


def test_eight_bits_are_refused_where_another_transformation_updates():
    made = optax.chain(optax.clip(0.1), fused_adamw(1e-3, bits=8))
    with pytest.raises(ValueError, match=r"^bits=8: a fused optimizer inside another"):
        made.update(PARAMS, made.init(PARAMS), PARAMS)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fused_adamw(1e-3, bits=16), "bits=16 must be 32"),
        (lambda: fused_lion(1e-3, b1=1.0), "b1=1.0 must be at least 0"),
        (lambda: fused_adamw(1e-3, eps=0.0), "eps=0.0 must be positive"),
        (lambda: fused_lamb("fast"), "learning_rate='fast' must be a number"),
        (lambda: fused_lion(1e-3, weight_decay=-0.1), "weight_decay=-0.1 must be at l"),
        (
            lambda: fused_lion(1e-3, weight_decay=float("nan")),
            "weight_decay=nan must be at least 0",
        ),
        (lambda: fused_adamw(1e-3, weight_decay=len), "weight_decay=.* for a schedule"),
    ],
)
def test_wrong_numbers_are_refused(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()
