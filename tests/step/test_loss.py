"""How is a loss function called, and are its results summed as NumPy does?"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.model.bridge import make_network
from jaxpar.sharding.collectives import ManualCollectives
from jaxpar.step.inputs import Packed, make_inputs, with_keys
from jaxpar.step.loss import Sums, as_losses, loss_sums, make_loss, over_packs
from jaxpar.step.row_draws import AsTraced, ShardKey
from jaxpar.step.weighted import Max, Sum, Weighted

X = np.arange(12.0, dtype=np.float32).reshape(4, 3)
INPUTS = make_inputs({"x": X}, jnp.int32(5))


def plain(model, batch):
    return batch["x"].mean()


class Callable:
    def __call__(self, model, batch, *, step):
        return step


@pytest.mark.parametrize(
    ("fn", "takes"),
    [
        (plain, set()),
        (lambda model, batch, key: 0.0, {"key"}),
        (lambda model, batch, *, training, step: 0.0, {"training", "step"}),
        (lambda model, batch, scale=2.0, key=None: 0.0, {"key"}),
        (lambda model, batch, *others, **options: 0.0, set()),
        (Callable(), {"step"}),
        (functools.partial(lambda model, batch, key: 0.0, key=1), set()),
        (max, set()),
    ],
)
def test_arguments_are_read_by_name(fn, takes):
    loss, evaluation = as_losses(fn, None)
    assert loss.takes == takes
    assert evaluation is loss


def test_evaluation_has_its_own_function():
    loss, evaluation = as_losses(plain, lambda model, batch, step: 0.0)
    assert (loss.takes, evaluation.takes) == (set(), {"step"})


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("fns", "message"),
    [
        ((lambda model, batch, rng, x: 0.0, None), "^loss_fn: it takes rng, x besides"),
        ((plain, lambda model, batch, *, y: 0.0), "^eval_fn: it takes y besides"),
        ((3, None), r"^loss_fn=3 must be a function \(model, batch\) -> loss"),
    ],
)
def test_argument_that_a_step_lacks_raises(fns, message):
    with pytest.raises(TypeError, match=message):
        as_losses(*fns)


def test_loss_function_gets_the_step_the_mode_and_a_key_of_its_own():
    seen = {}

    def fn(model, batch, *, key, step, training):
        seen.update(model=model, x=batch["x"], key=key, step=step, training=training)
        return 0.0

    key = jax.random.key(3)
    as_losses(fn, None)[0]("the model", INPUTS, key=key, training=False)
    assert (seen["model"], seen["step"], seen["training"]) == ("the model", 5, False)
    assert seen["x"] is X
    # A model folds in small numbers: no draw of the loss may equal one of its.
    assert not any(seen["key"] == jax.random.fold_in(key, i) for i in range(4))
    assert seen["key"] != key


def test_mean_becomes_a_sum_over_rows_and_metrics_stay_what_they_are():
    kept = {"n": Sum(4), "top": Max(7.0), "w": Weighted(3.0, 2.0), "m": jnp.float32(2)}
    sums = loss_sums((jnp.float32(1.5), kept), INPUTS)
    assert (float(sums.loss.total), float(sums.loss.weight)) == (6.0, 4.0)
    results = {name: float(x) for name, x in sums.results().items()}
    assert results == {"loss": 1.5, "n": 4.0, "top": 7.0, "w": 1.5, "m": 2.0}


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (jnp.int32(1), "the loss is int32, which has no gradient; it must be floating"),
        (Weighted(jnp.int32(1), 2.0), "the loss is int32, which has no gradient"),
        ((1.0, [2.0]), r"a tuple of \(float, list\), but must return a loss, or"),
        ((1.0, jnp.ones(3)), r"a tuple of \(float, float32\[3\]\), but must"),
        ((1.0, {"skipped": 1.0, "loss": 1.0}), r"metrics \['loss', 'skipped'\] are na"),
        (jnp.ones(3), r"loss has shape \(3,\), but must be a scalar"),
    ],
)
def test_result_that_is_not_a_loss_raises(out, message):
    with pytest.raises(ValueError, match=f"^loss_fn: .*{message}"):
        loss_sums(out, INPUTS)


def test_sums_of_all_shards_are_combined_by_their_kind():
    mesh = make_mesh(MeshShape(data=4), jax.devices()[:4])
    totals, weights, tops = np.random.default_rng(0).normal(size=(3, 4)).astype("f4")

    def body(total, weight, top):
        metrics = {"n": Sum(weight[0]), "top": Max(top[0])}
        sums = Sums(Weighted(total[0], weight[0]), metrics)
        return sums.over_data(
            ManualCollectives(("data",), jnp.dtype(jnp.float32), "cpu")
        )

    run = jax.shard_map(
        body, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
    )
    sums = jax.jit(run)(totals, weights, tops)
    assert float(sums.loss.total) == pytest.approx(totals.sum(), rel=1e-5)
    assert float(sums.metrics["n"].value) == pytest.approx(weights.sum(), rel=1e-5)
    assert float(sums.metrics["top"].value) == tops.max()


def test_packs_run_in_order_each_from_the_state_after_the_last():
    """The state is doubled and a pack's sum is added, so that the order matters."""
    key = jax.random.key(2)
    inputs = with_keys(make_inputs(Packed({"x": jnp.asarray(X)}), jnp.int32(0)), key)

    def call(key: Any, model_state: Any, inputs: Any) -> Any:
        total = inputs.batch.pack["x"].sum()
        drawn = jax.random.uniform(key)
        after = {"s": 2 * model_state["s"] + total}
        return Sums(Weighted(total, 1.0 + 0 * total), {"u": Max(drawn)}), after

    sums, state = over_packs(call, {"s": jnp.float32(1)}, key, inputs)
    right = 1.0
    for row in X:
        right = 2 * right + row.sum()
    assert float(state["s"]) == right
    assert (float(sums.loss.total), float(sums.loss.weight)) == (X.sum(), 4)
    drawn = [jax.random.uniform(jax.random.fold_in(key, i)) for i in range(4)]
    assert float(sums.metrics["u"].value) == float(max(drawn))


class Counted(nnx.Module):
    """A model that counts its calls, whatever the mode."""

    def __init__(self, rngs: nnx.Rngs):
        self.scale, self.calls = nnx.Param(jnp.ones(3)), nnx.Variable(jnp.int32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls.set_value(self.calls[...] + 1.0)
        return x * self.scale[...]


@pytest.mark.parametrize("training", [False, True])
def test_state_of_the_model_changes_in_training_alone(training):
    """And keeps its dtype."""
    loss = as_losses(lambda model, batch: model(batch["x"]).mean(), None)[0]
    network = make_network(Counted, loss.on_sample, INPUTS)
    params, state = network.init(jax.random.key(0))
    leaves, structure = jax.tree.flatten((params, {}))
    run = make_loss(network, loss, structure, AsTraced(), training=training)
    key = ShardKey(jax.random.key(0), jnp.int32(0))
    sums, after = jax.jit(run)(leaves, state, key, INPUTS)
    assert (int(after["calls"]), after["calls"].dtype) == (int(training), jnp.int32)
    assert float(sums.loss.weight) == 4
