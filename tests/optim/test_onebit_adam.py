"""Are wrong numbers refused, and is the state Adam's?

What it computes is in tests/equivalence/test_onebit_adam.py.
"""

import jax.numpy as jnp
import optax
import pytest

from jaxpar import tree
from jaxpar.optim import onebit_adam
from tests.equivalence.perceptron import batches, make_engine


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"freeze_step": 0}, "freeze_step=0 must be at least 1"),
        ({"freeze_step": 5, "b1": 1.0}, "b1=1.0 must be from 0 to below 1"),
        ({"freeze_step": 5, "b2": -0.1}, "b2=-0.1 must be from 0 to below 1"),
    ],
)
def test_numbers_out_of_range_are_refused(given: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        onebit_adam(1e-3, **given)


def test_the_state_has_adam_s_names() -> None:
    params = {"w": jnp.ones(3)}
    own = tree.named_leaves(onebit_adam(1e-3, 5).init(params))
    adam = tree.named_leaves(optax.scale_by_adam().init(params))
    assert set(own) == set(adam)


def test_a_schedule_is_in_the_metrics() -> None:
    rate = optax.linear_schedule(1e-2, 0.0, 10)
    engine = make_engine(onebit_adam(rate, 2), 4, 1, 1)
    found = [float(engine.step(batch)["learning_rate"]) for batch in batches()[:3]]
    assert found == pytest.approx([1e-2, 9e-3, 8e-3])
