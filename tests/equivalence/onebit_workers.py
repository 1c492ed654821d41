"""The workers of a 1-bit optimizer in NumPy, put into the state of an engine."""

from typing import Any

import jax
import numpy as np

import jaxpar
from jaxpar import tree
from tests.equivalence.perceptron import ROWS, loss_of
from tests.optim.numpy_onebit import NumpyOneBitAdam


def named(state: Any) -> dict[str, np.ndarray]:
    return tree.named_leaves(jax.device_get(state))


def continue_from(simulation: NumpyOneBitAdam, engine: jaxpar.Engine) -> None:
    """Go on from the state of an engine without a tensor axis."""
    state, workers = engine.state, simulation.n
    simulation.step_number = int(state.opt_state.count)
    simulation.params = {
        name: x.astype(np.float64) for name, x in named(state.params).items()
    }
    simulation.mu, simulation.nu = named(state.opt_state.mu), named(state.opt_state.nu)
    carry = jax.device_get(state.carried["reduction"])
    worker, server = {}, {}
    for name, p in simulation.params.items():
        worker[name] = carry["worker"][name].reshape(workers, -1)
        # Element i is in chunk i mod n.
        server[name] = carry["server"][name][:, 0].T.reshape(-1)[: p.size]
    simulation.set_errors(worker, server)


def gradients(
    engine: jaxpar.Engine, batch: dict, workers: int
) -> list[dict[str, np.ndarray]]:
    """By worker, the gradient of its rows."""
    params, count = jax.device_get(engine.state.params), ROWS // workers
    parts = [slice(n * count, (n + 1) * count) for n in range(workers)]
    rows = [{name: x[part] for name, x in batch.items()} for part in parts]
    return [named(jax.grad(loss_of)(params, own)) for own in rows]
