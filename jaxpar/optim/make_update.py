"""Which `Update` runs an optimizer?"""

from typing import Any

import optax
from jax.sharding import Mesh

from jaxpar.mesh import DATA
from jaxpar.optim.buckets import Buckets
from jaxpar.optim.fused import FusedOptimizer
from jaxpar.optim.fused_update import FusedUpdate
from jaxpar.optim.optax_update import OptaxUpdate
from jaxpar.optim.trace_update import trace_update
from jaxpar.sharding.zero import LeafSharding
from jaxpar.step.update import Update
from jaxpar.types import Params, PyTree


def make_update(
    optimizer: optax.GradientTransformation | FusedOptimizer,
    leaf_shardings: tuple[LeafSharding, ...],
    mesh: Mesh,
    shapes: tuple[Params, PyTree],
    compute_dtype: Any,
) -> Update:
    """Run an optimizer on a mesh.

    Args:
      optimizer: any optax transformation, or a fused one.
      leaf_shardings: the parameters' shardings, in flattening order.
      mesh: the mesh.
      shapes: of the parameters, and of the optimizer's logical state.
      compute_dtype: of the parameters that the loss function sees.

    Raises:
      ValueError: if the update needs arguments or state that a step doesn't support.
    """
    if isinstance(optimizer, FusedOptimizer):
        return FusedUpdate(
            optimizer, Buckets(leaf_shardings, mesh), shapes[0], compute_dtype
        )
    traced = trace_update(optimizer, *shapes)
    loops_over = mesh.shape[DATA] if traced.has_loops else 1
    return OptaxUpdate(optimizer, traced.extras, loops_over)
