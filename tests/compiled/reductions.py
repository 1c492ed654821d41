"""Steps of reductions from outside the package, for GPUs that are not here.

Runs in the process that has the compilers.
"""

import jax
import jax.numpy as jnp
import optax

import jaxpar
from jaxpar.compiled.budget import Budget, record
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.optim import WithReduction
from jaxpar.planner.absent_devices import gpu_devices
from tests.compiled.programs import Perceptron, squared
from tests.optim.int8_reduction import Int8Reduction

WIDTH, LAYERS, GPUS = 512, 4, 8


def traffic(zero: int, tensor: int) -> dict[str, tuple[Budget, Budget]]:
    """By reduction, what a step in fp32 moves, and what its closed form names."""
    adamw = optax.adamw(1e-3)
    found = {}
    for name, optimizer in {
        "plain": adamw,
        "int8": WithReduction(adamw, Int8Reduction()),
    }.items():
        shape = MeshShape(data=-1, tensor=tensor)
        engine = jaxpar.initialize(
            model=lambda rngs: Perceptron(LAYERS, WIDTH, rank=0, rngs=rngs),
            loss_fn=squared,
            optimizer=optimizer,
            sample_batch=jax.ShapeDtypeStruct((GPUS, WIDTH), jnp.float32),
            mesh=make_mesh(shape, gpu_devices("h200", 1, GPUS)),
            zero=zero,
        )
        engine.verify()
        measured = engine.measure(engine.lowered())
        found[name] = record(measured), engine.closed_form_budget()
    return found
