"""Is anything whole on a device under stage 3: at init, at rest, in what a step takes?

Checked on the arrays themselves, on all that are alive, and in the compiled programs.
Adam's state takes 12 Psi / N bytes; the batch, scalars and leaves under 1 KB come on
top.
"""

import gc
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar import tree
from jaxpar.sharding.zero import WHOLE_BELOW_BYTES
from jaxpar.step.state import make_init

ROWS, WIDTH, HIDDEN, LAYERS = 16, 128, 512, 3
DEVICES = 8


class Net(nnx.Module):
    """A scanned stack of large layers, and one not scanned."""

    def __init__(self, rngs: nnx.Rngs):
        init = jax.nn.initializers.normal(0.02)
        self.up = nnx.Param(init(rngs.params(), (LAYERS, WIDTH, HIDDEN)))
        self.down = nnx.Param(init(rngs.params(), (LAYERS, HIDDEN, WIDTH)))
        self.out = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, kernels: tuple) -> tuple[jax.Array, None]:
            up, down = kernels
            return x + nnx.relu(x @ up) @ down, None

        x, _ = jax.lax.scan(layer, x, (self.up[...], self.down[...]))
        return self.out(x)


def loss_fn(model: Net, batch: dict) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


BATCH = {"x": np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)}


def make_engine(data: int, tensor: int) -> jaxpar.Engine:
    return jaxpar.initialize(
        model=lambda rngs: Net(rngs),
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-3),
        sample_batch=BATCH,
        mesh=jaxpar.MeshShape(data=data, tensor=tensor),
        zero=3,
        accumulate=2,
    )


@pytest.fixture(scope="module")
def others() -> list[jax.Array]:
    """What other tests of this process have left: here it stays alive, and known."""
    gc.collect()
    return jax.live_arrays()


@pytest.fixture(scope="module", params=[(8, 1), (4, 2)], ids=["data8", "data4tensor2"])
def engine(request: pytest.FixtureRequest, others: list[jax.Array]) -> jaxpar.Engine:
    return make_engine(*request.param)


def large_leaves(engine: jaxpar.Engine) -> dict[str, jax.Array]:
    parts = {"params": engine.state.params, "opt_state": engine.state.opt_state}
    named = tree.named_leaves(parts)
    return {n: x for n, x in named.items() if x.nbytes >= WHOLE_BELOW_BYTES}


def check_nothing_is_whole(engine: jaxpar.Engine) -> None:
    leaves = large_leaves(engine)
    assert len(leaves) == 3 * 4, "params, mu and nu of three kernels and a bias"
    for name, leaf in leaves.items():
        assert len(leaf.addressable_shards) == DEVICES
        for shard in leaf.addressable_shards:
            assert shard.data.size * DEVICES == leaf.size, name


def test_no_device_holds_a_whole_leaf_after_init_and_a_step(
    engine: jaxpar.Engine,
) -> None:
    check_nothing_is_whole(engine)
    before = engine.state.params
    engine.step(BATCH)
    check_nothing_is_whole(engine)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before)), "donated"


def test_no_live_array_is_as_large_as_a_whole_leaf(
    engine: jaxpar.Engine, others: list[jax.Array]
) -> None:
    engine.step(BATCH)
    gc.collect()
    shapes = {leaf.shape for leaf in large_leaves(engine).values()}
    state = {id(leaf) for leaf in jax.tree.leaves(engine._leaves)}
    known = {id(array) for array in others}
    new = [array for array in jax.live_arrays() if id(array) not in known]
    same = [array for array in new if array.shape in shapes]
    whole = [
        array
        for array in same
        if any(shard.data.shape == array.shape for shard in array.addressable_shards)
    ]
    assert not whole
    assert {id(array) for array in same} <= state, "one copy of the state is alive"


def test_compiled_step_takes_its_share_of_the_state(engine: jaxpar.Engine) -> None:
    memory = engine.lower().compile().memory_analysis()
    psi = tree.num_elements(engine.state.params)
    batch_bytes = tree.num_bytes(BATCH) / engine.mesh.shape["data"]
    right = 12 * psi / DEVICES + batch_bytes
    assert memory.argument_size_in_bytes == pytest.approx(right, rel=0.01)
    assert memory.alias_size_in_bytes == pytest.approx(right - batch_bytes, rel=0.01)


def test_no_stack_of_layers_is_whole_while_the_step_runs(
    engine: jaxpar.Engine,
) -> None:
    """Layers are gathered one by one, forward and backward; so are their gradients."""
    program = engine.lower().compile().as_text()
    assert program is not None
    assert f"f32[{WIDTH},{HIDDEN}]" in program
    for dims in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        assert f"f32[{LAYERS},{dims[0]},{dims[1]}]" not in program


def test_init_makes_shards_only(engine: jaxpar.Engine) -> None:
    given = optax.adamw(1e-3).init, engine.placement.carried
    init = make_init(engine._network, *given)
    shardings = engine.placement.shardings
    compiled = jax.jit(init, out_shardings=shardings).lower(jax.random.key(0)).compile()
    made = jax.tree.leaves(compiled.output_shardings)
    for one, other, leaf in zip(
        made, jax.tree.leaves(shardings), jax.tree.leaves(engine.state), strict=True
    ):
        assert one.is_equivalent_to(other, leaf.ndim)
    memory = compiled.memory_analysis()
    psi = tree.num_elements(engine.state.params)
    assert memory.output_size_in_bytes == pytest.approx(12 * psi / DEVICES, rel=0.01)
    largest = max(leaf.nbytes for leaf in large_leaves(engine).values())
    assert largest == 4 * math.prod((LAYERS, WIDTH, HIDDEN))
    assert memory.temp_size_in_bytes <= 2 * largest
