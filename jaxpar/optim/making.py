"""Which `Update` runs an optimizer."""

from typing import Any

import optax
from jax.sharding import Mesh

from jaxpar.optim.buckets import Buckets
from jaxpar.optim.fused import FusedOptimizer
from jaxpar.optim.fused_update import FusedUpdate
from jaxpar.optim.update import OptaxUpdate, Update
from jaxpar.sharding.zero import LeafPlan
from jaxpar.types import Params


def make_update(
    optimizer: optax.GradientTransformation | FusedOptimizer,
    plans: tuple[LeafPlan, ...],
    mesh: Mesh,
    like: Params,
    compute_dtype: Any,
) -> Update:
    """Run an optimizer on a mesh.

    Args:
      optimizer: any optax transformation, or a fused one.
      plans: the parameters' layouts, in flattening order.
      mesh: the mesh.
      like: the parameters' shapes.
      compute_dtype: of the parameters that the loss function sees.
    """
    if isinstance(optimizer, FusedOptimizer):
        return FusedUpdate(optimizer, Buckets(plans, mesh), like, compute_dtype)
    return OptaxUpdate(optimizer)
