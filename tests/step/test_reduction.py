"""Is a reduction held to what it promises: its bytes, its sums, its norm, its state?

`tests/equivalence/test_reduction.py` trains with one; this is the interface.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.optim import (
    LocalGradients,
    PlainReduction,
    Wire,
    WithReduction,
)
from jaxpar.sharding.collectives import local_view
from jaxpar.sharding.leaf_sharding import LeafSharding
from tests.equivalence.perceptron import (
    batches,
    make_engine,
    run_plainly,
)
from tests.equivalence.problems import distance
from tests.optim.local_sgd import LocalSgd

SGD = optax.sgd(0.1)


class Unreduced(PlainReduction):
    """Every shard keeps its own gradients, and says that it reduces them."""

    def reduce(self, leaves, grads, carry, collectives):
        def own(leaf: LeafSharding, grad: jax.Array) -> jax.Array:
            view, dim = local_view(leaf, grad), leaf.view_data_dim
            if dim is None:
                return view
            size = view.shape[dim] // leaf.data_ways
            start = jax.lax.axis_index(leaf.data_axes) * size
            return jax.lax.dynamic_slice_in_dim(view, start, size, dim)

        return list(map(own, leaves, grads)), carry


@pytest.mark.parametrize("width", [4, 512], ids=["small leaves", "large leaves"])
@pytest.mark.parametrize("zero", [0, 1])
def test_reduction_that_does_not_reduce_is_seen_in_the_program(zero, width):
    """It trains: losses fall, and nothing else says that shards part."""

    def engine_of(optimizer: Any) -> jaxpar.Engine:
        return jaxpar.initialize(
            model=lambda rngs: nnx.Linear(16, width, rngs=rngs),
            loss_fn=lambda model, batch: jnp.mean((model(batch["x"]) - 1) ** 2),
            optimizer=optimizer,
            sample_batch=batches()[0],
            mesh=jaxpar.MeshShape(data=8),
            zero=zero,
        )

    engine_of(SGD).verify()
    engine = engine_of(WithReduction(SGD, Unreduced()))
    losses = [float(engine.step(batches()[0])["loss"]) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    said = (
        r"data: all-reduce and reduce-scatter moves [\d,]+ bytes a step, but must move "
        rf"at least {4 * 17 * width:,}: gradients are not reduced as they should be\."
    )
    with pytest.raises(jaxpar.BudgetExceeded, match=said):
        engine.verify()
    if zero == 0:
        with pytest.raises(jaxpar.CorruptionError, match="params/kernel"):
            engine.probe()


@pytest.mark.parametrize("zero", [0, 3])
def test_leaves_without_a_gradient_need_not_be_reduced(zero):
    """XLA joins the reductions of zeros that are equal, or drops them."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.used = nnx.Linear(16, 32, rngs=rngs)
            self.stopped = nnx.Linear(32, 32, rngs=rngs)
            self.unused = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(4)])

        def __call__(self, x):
            return self.stopped.kernel[...].sum() * self.used(x)

    def loss_fn(model, batch):
        graph, params = nnx.split(model)
        stopped = jax.tree.map(jax.lax.stop_gradient, params["stopped"])
        model = nnx.merge(graph, nnx.State({**params, "stopped": stopped}))
        return jnp.mean(model(batch["x"]) ** 2)

    engine = jaxpar.initialize(
        model=lambda rngs: Net(rngs),
        loss_fn=loss_fn,
        optimizer=SGD,
        sample_batch=batches()[0],
        mesh=jaxpar.MeshShape(data=8),
        zero=zero,
    )
    without = [name for name, share in engine.spec.shares.items() if share == 0]
    assert {name.split("/")[0] for name in without} == {
        "stopped",
        "unused",
    }
    engine.verify()
    least = engine.closed_form_budget().at_least["data"]["reduction"]
    assert least == 4 * 17 * 32


SIZES = {"replica": 2, "data": 4, "expert": 1, "pipe": 1, "tensor": 2}


def leaf(name: str, shape: tuple, placed: tuple, data_dim: int | None) -> LeafSharding:
    compute = tuple(axes[0] if axes else None for axes in placed)
    over = ("replica", "data")
    return LeafSharding(name, shape, compute, data_dim, placed, SIZES, "", over)


SPLIT = leaf("w", (64, 16), ((), ("tensor",)), 0)
KEPT = leaf("b", (6,), ((),), None)


def test_plain_bytes_are_inside_a_replica_each_time_and_between_them_once():
    sent = PlainReduction().communicated([SPLIT, KEPT], Wire(SIZES, 2, times=3))
    assert sent == {
        "data": {"reduce-scatter": 3 * 2 * 64 * 16 // 2},
        "replica": {"all-reduce": 2 * 64 * 16 // 8},
        "replica x data": {"all-reduce": 3 * 2 * 6},
    }


def test_axes_of_one_device_are_not_named():
    one = SIZES | {"data": 1, "replica": 1}
    assert PlainReduction().communicated([SPLIT, KEPT], Wire(one, 4)) == {}


@pytest.mark.parametrize(("data", "tensor"), [(4, 2), (1, 2)])
def test_update_may_get_the_gradients_of_every_shard_and_sum_them(data, tensor):
    engine = make_engine(LocalSgd(0.1), data, tensor, zero=0, accumulate=2)
    found = [engine.step(batch) for batch in batches()]
    losses, params = run_plainly(SGD, takes_value=False)
    assert [float(step["loss"]) for step in found] == pytest.approx(losses, rel=1e-5)
    assert distance(engine.state.params, params) < 1e-6
    plain = make_engine(SGD, data, tensor, zero=0)
    norm = float(plain.step(batches()[0])["grad_norm"])
    bound = float(found[0]["grad_norm"])
    assert norm * (1 - 1e-6) <= bound <= norm * data**0.5 * 2
    assert (bound == pytest.approx(norm)) == (data == 1)


def test_bound_of_local_gradients_is_the_norm_where_all_are_equal():
    grads = {"w": jnp.broadcast_to(jnp.array([3.0, 4.0]) / 8, (8, 2))}
    assert float(LocalGradients().norm(grads)) == pytest.approx(5.0)
