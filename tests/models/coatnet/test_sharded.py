"""Have blocks on a mesh the gradients of one device, and what do they communicate?"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models.coatnet.config import CoatnetConfig
from jaxpar.models.coatnet.model import make_block

# Sizes that no other dim has, so that a shape in the program tells what it is.
CONFIG = CoatnetConfig(
    image_size=32,
    stem_width=12,
    stem_stride=1,
    widths=(12, 12, 14, 14),
    head_size=7,
    norm="group",
    norm_groups=2,
)
SPLIT = {"heads", "kv_heads", "mlp"}


@pytest.mark.parametrize("level", [1, 3])
def test_blocks_sharded_have_the_gradients_of_one_device_and_gather_nothing(level: int):
    block = make_block(CONFIG, level)(rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(block)
    side, width = CONFIG.map_sizes[level], CONFIG.widths[level]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, side, side, width)).astype(np.float32)
    weights = rng.normal(size=x.shape).astype(np.float32)
    leaves, treedef = jax.tree.flatten(state)
    leaves = [leaf + 0.1 * rng.normal(size=leaf.shape) for leaf in leaves]
    leaves = [jnp.asarray(leaf, jnp.float32) for leaf in leaves]

    def total(leaves: list[jax.Array], x: Any, weights: Any) -> jax.Array:
        own = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        return (own(x) * weights).sum()

    program = jax.jit(jax.value_and_grad(total))
    want_total, want = program(leaves, x, weights)
    mesh = make_mesh(MeshShape(data=2, tensor=2), jax.devices()[:4])
    named = [v.get_metadata("out_sharding") for _, v in nnx.to_flat_state(state)]
    specs = [P(*("tensor" if n in SPLIT else None for n in names)) for names in named]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    rows = NamedSharding(mesh, P("data"))
    placed = jax.device_put((leaves, x, weights), (shardings, rows, rows))
    with jax.set_mesh(mesh):
        sharded = jax.jit(jax.value_and_grad(total), out_shardings=(None, shardings))
        compiled = sharded.lower(*placed).compile()
        found_total, found = compiled(*placed)
    assert float(found_total) == pytest.approx(float(want_total), rel=1e-5)
    whole = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in want))
    for leaf, other in zip(found, want, strict=True):
        error = np.linalg.norm(leaf - other)
        assert error < max(1e-5 * np.linalg.norm(other), 1e-6 * whole)
    text = compiled.as_text() or ""
    assert "all-reduce" in text
    assert not re.findall(r" (?:all-gather|all-to-all)(?:-start)?\(", text)
