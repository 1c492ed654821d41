"""Are a Linen module's collections and streams what Linen makes of them?"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.model.bridge import make_network
from jaxpar.tree import named_leaves

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
BATCH = {"x": jax.ShapeDtypeStruct((4, 3), jnp.float32)}
KEY = jax.random.key(0)


def run(network, variables, fn, key=KEY, training=True):
    return network.run(fn, variables, key, {"x": X}, training=training)


class Sowing(nn.Module):
    """State that is a variable, state that is put, and what is sown."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        steps = self.variable("steps", "n", lambda: jnp.zeros(()))
        total = self.get_variable("total", "sum", jnp.zeros(4))
        if self.is_mutable_collection("steps"):
            steps.value += 1
            self.put_variable("total", "sum", total + x.sum(0))
        self.sow("losses", "aux", x.mean())
        self.sow("sums", "aux", x.sum(), reduce_fn=jnp.add, init_fn=lambda: 0.0)
        self.sow("intermediates", "x", x)
        self.perturb("y", x)
        return x


def sowing(mutable=False):
    def loss(model, batch):
        out = model(batch["x"], mutable=mutable)
        return out.mean() if mutable is False else out[0].mean()

    network = make_network(Sowing(), loss, BATCH)
    return network, network.init(KEY)


def test_what_a_linen_module_sows_is_not_state():
    for mutable in (False, True, ["losses", "intermediates"]):
        _, (params, state) = sowing(mutable)
        assert sorted(params) == ["Dense_0"]
        assert sorted(named_leaves(state)) == ["steps/n", "total/sum"]


class AutoEncoder(nn.Module):
    """Two methods, each with parameters of its own, and statistics."""

    def setup(self):
        self.up, self.down = nn.Dense(4), nn.Dense(3)
        self.norm = nn.BatchNorm(use_running_average=False)

    def encode(self, x):
        return self.norm(self.up(x))

    def decode(self, z):
        return self.down(z)

    def __call__(self, x):
        return self.decode(self.encode(x))


def test_every_call_of_a_loss_function_initialises_what_it_needs():
    """Of two methods the second one's parameters were missing at the first step."""

    def loss(model, batch):
        encoded = model(batch["x"], method="encode")
        return model(encoded, method="decode").mean()

    network = make_network(AutoEncoder(), loss, BATCH)
    one = make_network(AutoEncoder(), lambda model, b: model(b["x"]).mean(), BATCH)
    (params, state), (like, state_of_one) = network.init(KEY), one.init(KEY)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, like)
    jax.tree.map(np.testing.assert_array_equal, state, state_of_one)
    run(network, (params, state), loss)


def test_linen_call_returns_the_collections_that_it_is_asked_for():
    network, (params, state) = sowing()

    def asked(mutable):
        def fn(model, batch):
            return model(batch["x"], mutable=mutable)

        return run(network, (params, state), fn)

    (out, changed), after = asked(["losses", "sums", "steps"])
    assert sorted(changed) == ["losses", "steps", "sums"]
    (aux,) = changed["losses"]["aux"]
    np.testing.assert_allclose(aux, out.mean(), rtol=1e-6)
    np.testing.assert_allclose(changed["sums"]["aux"], out.sum(), rtol=1e-6)
    assert float(changed["steps"]["n"]) == float(after["steps"]["n"]) == 2.0
    np.testing.assert_allclose(after["total"]["sum"], out.sum(0), rtol=1e-5)
    assert sorted(asked("losses")[0][1]) == ["losses"]
    assert "losses" not in asked(nn.DenyList(["losses", "params"]))[0][1]
    assert asked([])[0][1] == {}


def test_linen_evaluation_returns_what_is_sown_and_keeps_nothing():
    network, variables = sowing()
    (_, changed), after = run(
        network,
        variables,
        lambda m, b: m(b["x"], mutable=["losses"]),
        training=False,
    )
    assert sorted(changed) == ["losses"]
    assert float(after["steps"]["n"]) == float(variables[1]["steps"]["n"])


class Drawing(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.param("w", nn.initializers.normal(), (2,))
        return {
            name: jax.random.uniform(self.make_rng(name))
            for name in ("dropout", "noise")
        }


def test_linen_streams_are_the_callers_where_it_brings_them():
    def drawn(rngs, seed=0):
        def fn(model, batch):
            return model(batch["x"], rngs=rngs)

        out, _ = run(network, network.init(KEY), fn, jax.random.key(seed))
        return {name: float(value) for name, value in out.items()}

    network = make_network(Drawing(), lambda m, b: m(b["x"])["noise"], BATCH)
    mine = {"dropout": jax.random.key(5), "noise": jax.random.key(6)}
    plain = Drawing().apply({"params": {"w": jnp.ones(2)}}, X, rngs=mine)
    assert drawn(mine) == drawn(mine, seed=1) == jax.tree.map(float, plain)
    assert drawn(None)["noise"] != drawn(None, seed=1)["noise"]
    one = drawn({"dropout": mine["dropout"]})
    assert one["dropout"] == drawn(mine)["dropout"]
    assert one["noise"] == drawn(None)["noise"]
    whole = drawn(jax.random.key(7))
    assert whole == drawn(jax.random.key(7), seed=1)
    assert whole["dropout"] != whole["noise"]


def test_linen_parameters_do_not_depend_on_the_callers_streams():
    def params(rngs):
        def loss(model, batch):
            return model(batch["x"], rngs=rngs)["noise"]

        return make_network(Drawing(), loss, BATCH).init(KEY)[0]

    before, after = params(None), params({"params": jax.random.key(9)})
    np.testing.assert_array_equal(before["w"], after["w"])


def test_rules_that_come_with_a_linen_parameter_rename_its_dims():
    named = nn.with_logical_partitioning(
        nn.initializers.ones, ("a", "b"), rules=(("a", "model"), ("b", None))
    )
    network = make_network(
        nn.Dense(4, kernel_init=named), lambda m, b: m(b["x"]).mean(), BATCH
    )
    assert network.dim_names()["kernel"] == ("model", None)


@pytest.mark.parametrize(
    ("module", "names", "fits"),
    [
        (nn.Dense(4), ("embed", "mlp"), True),
        (nn.Dense(4), ("data", None), False),
        (nn.DenseGeneral((2, 2)), (None, "tensor"), True),
        (nn.DenseGeneral((2, 2)), (None, "tensor", None), False),
        (nn.DenseGeneral(4), ("embed", "mlp"), False),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else str(x),
)
def test_mesh_is_in_context_unless_flax_takes_names_for_its_axes(module, names, fits):
    """DenseGeneral opens its kernel's box, with the dims of features joined."""
    kernel_init = nn.with_partitioning(nn.initializers.ones, names)
    seen = []

    def loss(model, batch):
        seen.append(not jax.sharding.get_abstract_mesh().empty)
        return model(batch["x"]).mean()

    network = make_network(module.clone(kernel_init=kernel_init), loss, BATCH)
    variables = jax.eval_shape(network.init, KEY)
    mesh = make_mesh(MeshShape(data=4, tensor=2)).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(lambda own: run(network, own, loss), variables)
    assert seen[-1] == fits
