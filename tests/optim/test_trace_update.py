"""Is an optimizer that can't be stepped with said before anything compiles?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax import contrib

import jaxpar
from jaxpar.optim.trace_update import UpdateTrace, trace_update

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
    "a tuple for a list": (
        optax.GradientTransformation(
            lambda params: [jnp.zeros(3)], lambda g, old, params=None: (g, tuple(old))
        ),
        r"its update returns a state of another structure than init: PyTreeDef\(\(\*,\)"
        r"\) for PyTreeDef\(\[\*\]\)",
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


@pytest.mark.parametrize("case", STATES)
def test_update_that_a_step_cannot_carry_is_refused(case, compiled):
    optimizer, message = STATES[case]
    with pytest.raises(ValueError, match=message):
        make_engine(optimizer)
    assert compiled == []


def of_nothing(grads: Any, state: Any, params: Any = None) -> Any:
    return grads, state


def of_value(grads: Any, state: Any, params: Any = None, *, value: Any) -> Any:
    return jax.tree.map(lambda x: x * value, grads), state


def of_any(grads: Any, state: Any, params: Any = None, **extras: Any) -> Any:
    assert {name: jax.tree.map(jnp.shape, x) for name, x in extras.items()} == {
        "value": (),
        "grad": {"w": (4, 6)},
    }
    return grads, state


@pytest.mark.parametrize(
    ("update", "extras"),
    [(of_nothing, ()), (of_value, ("value",)), (of_any, ("value", "grad"))],
)
def test_extras_are_those_that_the_update_takes(update, extras):
    params = {"w": jax.ShapeDtypeStruct((4, 6), jnp.float32)}
    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    assert trace_update(optimizer, params, ()) == UpdateTrace(extras, has_loops=False)


def test_loops_of_matmuls_are_seen():
    params = {"w": jax.ShapeDtypeStruct((4, 6), jnp.float32)}
    optimizer = contrib.muon(0.1)
    state = jax.eval_shape(optimizer.init, params)
    assert trace_update(optimizer, params, state).has_loops
