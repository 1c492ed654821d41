"""Is an optimizer that can't be stepped with said before anything compiles?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar

ROWS = 16


def make_engine(optimizer: Any) -> jaxpar.Engine:
    return jaxpar.initialize(
        model=lambda rngs: nnx.Linear(4, 6, rngs=rngs),
        loss_fn=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        optimizer=optimizer,
        sample_batch={"x": np.ones((ROWS, 4), np.float32)},
        mesh=jaxpar.MeshShape(data=4, tensor=2),
    )


def returning(state: Any, updates: Any = None) -> optax.GradientTransformation:
    """An optimizer whose update returns another state, or other updates."""

    def update(grads: Any, old: Any, params: Any = None) -> tuple[Any, Any]:
        return updates(grads) if updates else grads, state(old)

    return optax.GradientTransformation(
        lambda params: {"mean": jnp.zeros(3), "count": 0}, update
    )


def asking(grads: Any, state: Any, params: Any = None, *, batch: Any) -> Any:
    raise AssertionError("it is never called without a batch")


STATES = {
    "another shape": (
        returning(lambda old: old | {"mean": jnp.zeros(4)}),
        r"optimizer: its update turns leaf mean of its state from float32\[3\] into "
        r"float32\[4\]; it must not change them\.",
    ),
    "another dtype": (
        returning(lambda old: old | {"count": old["count"] + 0.5}),
        r"its update turns leaf count of its state from int32\[\] into float32\[\]",
    ),
    "another leaf": (
        returning(lambda old: {"mean": old["mean"], "steps": old["count"]}),
        r"its update returns a state of other leaves than init: new \['steps'\], gone "
        r"\['count'\]\. Let init return every leaf that update returns",
    ),
    "another structure": (
        returning(lambda old: [*old.values()], None),
        r"its update returns a state of other leaves than init: new \['0', '1'\]",
    ),
    "updates of another shape": (
        returning(lambda old: old, lambda g: jax.tree.map(lambda x: x.mean(0), g)),
        r"optimizer: its update returns shape \(6,\) for parameter kernel of shape "
        r"\(4, 6\); an update must have its parameter's shape",
    ),
    "an argument that nobody has": (
        optax.GradientTransformationExtraArgs(lambda params: (), asking),
        r"optimizer: its update needs batch, which a training step does not have",
    ),
}

TYPES = {
    "rate": (1e-3, r"optimizer=0\.001 must .*; pass a learning rate to one, as in op"
             r"tax\.adamw\(0\.001\)"),
    "schedule": (
        optax.cosine_decay_schedule(1e-3, 10),
        r"optimizer=<function cosine_decay_schedule.*> must .* call its factory, as in "
        r"optax\.adamw\(1e-3\), and pass a schedule to it, as in optax\.adamw\(sched",
    ),
    "nnx.Optimizer": (
        nnx.Optimizer(
            nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param
        ),
        r"optimizer=Optimizer\(\.\.\.\) must .*; pass the one inside it, "
        r"optimizer=tx for nnx\.Optimizer\(model, tx\)",
    ),
    "string in the state": (
        optax.GradientTransformation(
            lambda params: {"name": "mine"}, lambda grads, state, params=None: grads
        ),
        r"optimizer: leaf name of its state is str, but must be an array, a number or "
        r"a PRNG key\. Hold it outside of the state",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_update_that_a_step_cannot_carry_is_refused(case, compiled):
    optimizer, message = STATES[case]
    with pytest.raises(ValueError, match=message):
        make_engine(optimizer)
    assert compiled == []


@pytest.mark.parametrize("case", TYPES)
def test_what_is_no_optimizer_is_said(case, compiled, unchecked_types):
    optimizer, message = TYPES[case]
    with pytest.raises(TypeError, match=message):
        make_engine(optimizer)
    assert compiled == []
