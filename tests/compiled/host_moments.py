"""A step with Adam's moments in host memory, for devices that are not here."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.compiled.budget import Budget
from jaxpar.planner.plan import Plan
from jaxpar.planner.targets import parse_target
from tests.optim.moments_on_host import MomentsOnHost

WIDTH, DEVICES = 512, 4
INNER = optax.adam(1e-3)


def plan_of(target: str, on_host: bool) -> tuple[Plan, Budget]:
    """Compile the step for the target; its plan, and what it holds."""
    devices = parse_target(target).devices()
    engine = jaxpar.initialize(
        model=lambda rngs: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs),
        loss_fn=lambda model, batch: jnp.mean(model(batch) ** 2),
        optimizer=MomentsOnHost(INNER) if on_host else INNER,
        sample_batch=np.ones((8, WIDTH), np.float32),
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=DEVICES), devices),
        zero=1,
    )
    return jaxpar.plan(engine, target), engine.verify()
