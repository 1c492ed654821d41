"""Is an axis name that nothing binds taken for all examples of the micro-batch?"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.model.axis_names import BoundNetwork, bind_axes
from jaxpar.model.bridge import Network, make_network

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
KEY = jax.random.key(0)


def linear(rngs):
    return nnx.Linear(3, 1, rngs=rngs)


def run(network, loss):
    """The loss and the state after it."""

    @jax.jit
    def compiled(key, batch):
        return network.run(loss, network.init(key), key, batch, training=True)

    return compiled(KEY, X)


def plain(model, batch):
    return jnp.mean((model(batch) - 1.0) ** 2)


LOSSES = {
    "pmean": lambda m, b: jax.lax.pmean(plain(m, b), "batch"),
    "psum of two axes": lambda m, b: jax.lax.psum(plain(m, b), ("batch", "model")),
    "all_gather": lambda m, b: jax.lax.all_gather(plain(m, b), "batch").mean(),
    "axis_index": lambda m, b: plain(m, b) + jax.lax.axis_index("batch"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_collectives_over_an_axis_of_its_own_change_nothing(loss):
    made = make_network(linear, LOSSES[loss], X)
    network, (value, _) = bind_axes(made, lambda own: run(own, LOSSES[loss]))
    assert isinstance(network, BoundNetwork)
    assert isinstance(network, Network)
    assert value.shape == ()
    np.testing.assert_allclose(value, run(made, plain)[0], 1e-6)


def test_bound_linen_model_has_its_names_and_state():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.ones, (None, "mlp"))
            x = nn.Dense(2, kernel_init=init)(x)
            return nn.BatchNorm(use_running_average=False, axis_name="batch")(x)

    loss = LOSSES["pmean"]
    made = make_network(Net(), loss, X)
    network, (_, state) = bind_axes(made, lambda own: run(own, loss))
    assert network.dim_names()["Dense_0/kernel"] == (None, "mlp")
    mean = state["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, 0.01 * (X @ np.ones((3, 2))).mean(0), 1e-5, 1e-7)


def test_network_that_binds_its_axes_stays_as_it_is():
    def loss(model, batch):
        mean = jax.vmap(lambda row: jax.lax.pmean(row, "rows"), axis_name="rows")
        return mean(model(batch)).mean()

    network = make_network(linear, loss, X)
    assert bind_axes(network, lambda own: run(own, loss))[0] is network


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("name 'mean' is not defined", NameError),
        ("unbound axis name: batch", NameError),
    ],
)
def test_error_that_binding_does_not_mend_is_raised(message, error):
    def loss(model, batch):
        raise error(message)

    with pytest.raises(error, match=message):
        bind_axes(make_network(linear, loss, X), lambda own: run(own, loss))


def make_engine(loss_fn, eval_fn=None):
    return jaxpar.initialize(
        model=linear,
        loss_fn=loss_fn,
        eval_fn=eval_fn,
        optimizer=optax.sgd(0.1),
        sample_batch=np.tile(X, (4, 1)),
    )


def test_loss_that_averages_over_an_axis_is_given_whole_micro_batches():
    """A variance is not a mean over rows: by shards it would be another."""

    def variance(model, batch):
        out = model(batch)
        return jax.lax.pmean(jnp.mean((out - out.mean()) ** 2), "batch")

    engine, batch = (
        make_engine(variance),
        np.tile(X, (4, 1)) * np.arange(1, 17)[:, None],
    )
    kernel = np.asarray(engine.state.params["kernel"])
    found = float(engine.step(batch.astype(np.float32))["loss"])
    assert found == pytest.approx((batch @ kernel).var(), rel=1e-5)


def test_evaluation_may_average_over_an_axis_alone():
    engine = make_engine(plain, LOSSES["pmean"])
    assert engine.spec.coupled
    batch = np.tile(X, (4, 1))
    expected = np.mean((batch @ np.asarray(engine.state.params["kernel"]) - 1) ** 2)
    assert float(engine.evaluate(batch)["loss"]) == pytest.approx(expected)


def test_pipeline_refuses_an_axis_that_nothing_binds():
    def block(rngs):
        return nnx.Linear(1, 1, rngs=rngs)

    model = jaxpar.PipelineModel(embed=linear, sections=[(block, 2)], head=block)
    with pytest.raises(ValueError, match=r"axis name 'batch' is not bound.*pipe"):
        jaxpar.initialize(
            model=model,
            loss_fn=LOSSES["pmean"],
            optimizer=optax.sgd(0.1),
            sample_batch=np.tile(X, (4, 1)),
            mesh=jaxpar.MeshShape(pipe=2),
        )
