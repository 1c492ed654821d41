"""A linear model's parameters on a mesh, and its masked loss in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxpar
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.model.bridge import make_network
from jaxpar.sharding.zero import shard_leaves, zero_stage
from jaxpar.step.inputs import make_inputs
from jaxpar.step.loss import as_losses
from jaxpar.step.partition import Partition
from jaxpar.step.precision import make_precision
from jaxpar.step.row_draws import AsTraced
from jaxpar.tree import named_leaves

ROWS, WIDTH = 16, 32
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
MASK = (RNG.uniform(size=ROWS) > 0.4).astype(np.float32)
BATCH = {"x": X, "mask": MASK}


def weighted(model, batch):
    """A mean over rows that are not masked: its weight differs by shard."""
    squares = (model(batch["x"]) ** 2).sum(1)
    n = jaxpar.Sum(batch["mask"].sum())
    return jaxpar.Weighted((squares * batch["mask"]).sum(), batch["mask"].sum()), {
        "n": n
    }


LOSS = as_losses(weighted, None)[0]


def make_partition(
    shape: MeshShape, zero: int, *, coupled: bool = False
) -> tuple[Partition, Any]:
    """A linear model's, and its parameters."""
    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    network = make_network(
        lambda rngs: nnx.Linear(WIDTH, 16, rngs=rngs),
        LOSS.on_sample,
        make_inputs(BATCH, jnp.int32(0)),
    )
    params, _ = network.init(jax.random.key(0))
    whole = {name: (None,) * leaf.ndim for name, leaf in named_leaves(params).items()}
    structs = jax.eval_shape(lambda: params)
    leaves = shard_leaves(structs, whole, zero_stage(zero), mesh.shape)
    given = tuple(leaves.values()), (), zero_stage(zero), make_precision("fp32"), mesh
    return Partition(network, *given, coupled, AsTraced()), params


def plain_loss(params: Any, x: np.ndarray, mask: np.ndarray) -> Any:
    out = x @ params["kernel"] + params["bias"]
    return ((out**2).sum(1) * mask).sum() / mask.sum()
