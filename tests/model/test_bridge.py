"""Are NNX and Linen models the same thing to the engine: pure functions of dicts?"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.model.bridge import Network, UnderAxisRules, make_network
from jaxpar.model.linen import LinenModel
from jaxpar.tree import named_leaves

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
BATCH = {"x": jax.ShapeDtypeStruct((4, 3), jnp.float32)}
KEY = jax.random.key(0)


class NnxNet(nnx.Module):
    """Parameters, statistics, keys, a stack of layers and a tied leaf."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.ones
        kernel_init = nnx.with_partitioning(init, ("embed", "mlp"))
        self.up = nnx.Linear(3, 4, kernel_init=kernel_init, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(4), out_sharding=("mlp",))
        self.tied = self.scale

    def __call__(self, x):
        return self.drop(self.norm(self.up(x))) * self.scale[...] * self.tied[...]


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, training, twice: float = 1.0):
        ones = nn.with_partitioning(nn.initializers.ones, ("embed", "mlp"))
        x = nn.Dense(4, kernel_init=ones, name="up")(x)
        x = nn.BatchNorm(not training, momentum=0.5, name="norm")(x)
        self.sow("intermediates", "normed", x)
        x = nn.Dropout(0.5, deterministic=not training)(x)
        return x * self.param("scale", nn.initializers.ones, (4,)) * twice

    def doubled(self, x):
        return self(x, training=False, twice=2.0)


def no_loss(model, batch):
    return 0.0


def linen_loss(model, batch):
    return model(batch["x"], training=model.training).mean()


NETWORKS = {
    "nnx": lambda: make_network(NnxNet, lambda m, b: m(b["x"]).mean(), BATCH),
    "linen": lambda: make_network(LinenNet(), linen_loss, BATCH),
}


@pytest.fixture(scope="module", params=NETWORKS)
def network(request):
    return NETWORKS[request.param]()


@pytest.fixture(scope="module")
def variables(network):
    return network.init(KEY)


def outputs(model, batch):
    if isinstance(model, LinenModel):
        return model(batch["x"], training=model.training)
    return model(batch["x"])


def run(network, variables, key=KEY, training=True, fn=outputs):
    return network.run(fn, variables, key, {"x": X}, training=training)


def test_network_has_the_interface(network):
    assert isinstance(network, Network)


def test_init_gives_nested_dicts_of_parameters_and_state_without_keys(variables):
    params, state = variables
    assert sorted(named_leaves(params)) == [
        "norm/bias",
        "norm/scale",
        "scale",
        "up/bias",
        "up/kernel",
    ]
    names = [name.removeprefix("batch_stats/") for name in named_leaves(state)]
    assert names == ["norm/mean", "norm/var"]


def test_init_can_be_traced_and_depends_on_the_key(network):
    shapes = jax.eval_shape(network.init, KEY)
    again = network.init(jax.random.key(0))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, again)


def test_dims_are_called_as_the_model_names_them(network):
    names = network.dim_names()
    assert names["up/kernel"] == ("embed", "mlp")
    assert names["up/bias"] is None
    assert names["norm/scale"] is None


def test_training_changes_the_statistics_by_the_batch(network, variables):
    _, state = run(network, variables)
    (mean, _) = jax.tree.leaves(state)
    up = X @ np.ones((3, 4))
    np.testing.assert_allclose(mean, 0.5 * up.mean(0), rtol=1e-6, atol=1e-7)


def test_evaluation_changes_nothing_and_drops_nothing(network, variables):
    out, state = run(network, variables, training=False)
    assert jax.tree.all(jax.tree.map(np.array_equal, state, variables[1]))
    assert jax.tree.structure(state) == jax.tree.structure(variables[1])
    other, _ = run(network, variables, jax.random.key(1), training=False)
    assert np.array_equal(out, other)
    assert np.all(out != 0)


def test_dropout_follows_the_key_alone(network, variables):
    masks = [
        np.asarray(run(network, variables, jax.random.key(seed))[0]) != 0
        for seed in (1, 1, 2, 3)
    ]
    assert np.array_equal(masks[0], masks[1])
    assert not np.array_equal(masks[0], masks[2]) or not np.array_equal(
        masks[0], masks[3]
    )


def test_run_does_not_change_what_it_is_given(network, variables):
    before = jax.tree.map(np.array, variables)
    run(network, variables)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, variables))


def test_tied_leaf_is_one_parameter():
    network = NETWORKS["nnx"]()
    params, state = network.init(KEY)
    assert "tied" not in params
    params["scale"] = jnp.full(4, 3.0)
    ones = run(network, network.init(KEY), training=False)[0]
    np.testing.assert_allclose(
        run(network, (params, state), training=False)[0], 9 * ones, rtol=1e-6
    )


def test_every_layer_draws_masks_of_its_own():
    def factory(rngs):
        drops = nnx.List(nnx.Dropout(0.5, rngs=rngs) for _ in range(2))
        return nnx.Dict(w=nnx.Param(jnp.ones(1)), drops=drops)

    def masks_of(model, batch):
        return [drop(jnp.ones(64)) != 0 for drop in model["drops"]]

    network = make_network(factory, no_loss, BATCH)
    masks, _ = run(network, network.init(KEY), fn=masks_of)
    assert not np.array_equal(*masks)


class Stack(nnx.Module):
    """Layers by nnx.vmap: their keys and counts are stacked too."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,))
        def make(rngs):
            return nnx.Dropout(0.5, rngs=rngs)

        self.drops = make(rngs)
        self.w = nnx.Param(jnp.ones(1))

    def __call__(self, x):
        body = nnx.scan(
            lambda drop, x: (drop(x), drop(jnp.ones((64,))) != 0),
            in_axes=(0, nnx.Carry),
            out_axes=(nnx.Carry, 0),
        )
        return body(self.drops, x)[1]


def test_stacked_layers_get_keys_of_their_own():
    network = make_network(Stack, no_loss, BATCH)
    masks, _ = run(network, network.init(KEY), fn=lambda m, b: m(b["x"]))
    assert masks.shape == (2, 64)
    assert not np.array_equal(*masks)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("key", ["out_sharding", "sharding_names", "sharding"])
def test_every_spelling_of_the_metadata_is_read(key):
    def factory(rngs):
        model = nnx.Dict(w=nnx.Param(jnp.ones((2, 4))))
        model["w"].set_metadata(**{key: ("embed", "mlp")})
        return model

    network = make_network(factory, no_loss, BATCH)
    assert network.dim_names() == {"w": ("embed", "mlp")}


def test_linen_names_may_be_logical():
    named = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
    network = make_network(
        nn.Dense(4, kernel_init=named), lambda m, b: m(b["x"]).mean(), BATCH
    )
    assert network.dim_names() == {"bias": None, "kernel": ("embed", "mlp")}


def linen_model(training=True) -> Any:
    network = NETWORKS["linen"]()
    params, state = network.init(KEY)
    return LinenModel(LinenNet(), {"params": params, **state}, KEY, training=training)


def test_linen_state_goes_from_call_to_call():
    model = linen_model()
    first = model.variables["batch_stats"]["norm"]["mean"]
    means = [first]
    for _ in range(2):
        model(X, training=True)
        means.append(model.variables["batch_stats"]["norm"]["mean"])
    up = (X @ np.ones((3, 4))).mean(0)
    for mean, part in zip(means, (0, 0.5, 0.75), strict=True):
        np.testing.assert_allclose(mean, part * up, atol=1e-6)
    assert "intermediates" not in model.variables


def test_linen_calls_draw_masks_of_their_own():
    model = linen_model()
    masks = [np.asarray(model(X, training=True)) != 0 for _ in range(4)]
    assert len({mask.tobytes() for mask in masks}) > 1


def test_linen_method_and_keywords_go_through():
    model = linen_model(training=False)
    plain = model(X, training=False)
    doubled = model(X, method=LinenNet.doubled)
    np.testing.assert_allclose(doubled, 2 * plain, rtol=1e-6)


def test_linen_parameters_are_unboxed():
    params, _ = NETWORKS["linen"]().init(KEY)
    assert isinstance(params["up"]["kernel"], jax.Array)


class Configured(nnx.Module):
    def __init__(self, width=3, *, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (width,)))


@pytest.mark.parametrize(
    "factory",
    [
        Configured,
        functools.partial(Configured, 5),
        functools.partial(Configured, width=5),
        lambda rngs: Configured(rngs=rngs),
        lambda keys: Configured(rngs=keys),
        lambda *, rngs: Configured(rngs=rngs),
        lambda width=5, *, rngs: Configured(width, rngs=rngs),
        lambda **named: Configured(**named),
        lambda *given: Configured(rngs=given[0]),
    ],
)
def test_factory_takes_rngs_by_name_or_place(factory):
    params, _ = jax.eval_shape(make_network(factory, no_loss, BATCH).init, KEY)
    assert params["w"].shape in ((3,), (5,))


class Attributes(nnx.Module):
    """Arrays that are attributes, or in what Flax allows to hold them."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(3))
        self.array, self.numpy = jnp.full(3, 2.0), np.full(3, 3.0)
        self.number = nnx.Variable(4)
        self.nested = nnx.data({"a": [jnp.full(3, 5.0)]})
        self.listed = nnx.List([jnp.full(3, 6.0)])
        self.named = nnx.Dict(b=jnp.full(3, 7.0))
        # Flax refuses these two where it sees an array, and takes a tracer for static.
        self.pair, self.plain = (jnp.full(3, 8.0),), {"c": [jnp.full(3, 9.0)]}

    def __call__(self, x):
        self.array = self.array + x.sum(0)
        held = self.nested["a"][0] + self.listed[0] + self.named["b"]
        held += self.pair[0] + self.plain["c"][0]
        return x * self.w + self.array + self.numpy + self.number[...] + held


def test_array_attributes_are_state():
    network = make_network(Attributes, no_loss, BATCH)
    params, state = jax.jit(network.init)(KEY)
    assert sorted(named_leaves(params)) == ["w"]
    named = named_leaves(state)
    assert sorted(named) == [
        "array",
        "listed/0",
        "named/b",
        "nested/a/0",
        "number",
        "numpy",
        "pair/0",
        "plain/c/0",
    ]
    assert {x.dtype for x in named.values()} == {np.dtype("float32"), np.dtype("int32")}
    out, after = run(network, (params, state))
    array = 2.0 + X.sum(0)
    np.testing.assert_allclose(out, X + array + sum(range(3, 10)), rtol=1e-6)
    np.testing.assert_allclose(after["array"], array, rtol=1e-6)
    del after["array"], state["array"]
    jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.parametrize(
    ("names", "rules", "known"),
    [
        (("a", "b"), (("a", "model"),), ("model", "b")),
        (P("a", None), (), ("a", None)),
        ((("fsdp", "tp"), None), (), (("fsdp", "tp"), None)),
    ],
)
def test_rules_that_come_with_a_variable_rename_its_dims(names, rules, known):
    def factory(rngs):
        with nnx.use_eager_sharding(False):
            param = nnx.Param(
                jnp.ones((2, 4)), out_sharding=names, sharding_rules=rules
            )
        return nnx.Dict(w=param)

    assert make_network(factory, no_loss, BATCH).dim_names() == {"w": known}


@pytest.mark.parametrize("model", [nn.Dense(3), lambda rngs: NnxNet(rngs)])
def test_rules_in_context_are_those_of_the_network(model):
    """And are kept with the model, for a process that plans it."""
    rules = (("embed", "fsdp"),)
    with nn.logical_axis_rules([list(rule) for rule in rules]):
        network = make_network(model, linen_loss, BATCH)
    assert network.axis_rules == rules
    again = make_network(UnderAxisRules(model, rules), linen_loss, BATCH)
    assert again.axis_rules == rules
    assert make_network(model, linen_loss, BATCH).axis_rules == ()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
         r"model=Linear\(\.\.\.\) is already made, on one device; pass a factory,"
         r" model=lambda rngs: Linear\(\.\.\., rngs=rngs\)"),
        (3, r"model=3 must be an NNX factory \(lambda rngs: MyModel\(rngs=rngs\)\) or "
         r"a Linen module"),
        (lambda rngs: nn.Dense(3),
         r"model: the factory returned Dense, which is not an nnx\.Module; return one, "
         r"or pass the Linen module itself"),
        (lambda rngs: {"w": 1},
         r"model: the factory returned dict, which is not an nnx\.Module"),
    ],
    ids=["made", "number", "factory of Linen", "factory of a dict"],
)  # fmt: skip
def test_model_that_is_no_model_raises(model, message):
    with pytest.raises(TypeError, match=message):
        make_network(model, no_loss, BATCH)


def test_linen_loss_that_calls_no_model_raises():
    network = make_network(nn.Dense(2), lambda model, batch: batch["x"].mean(), BATCH)
    message = (
        r"loss_fn: it never called model\(\.\.\.\), so a Linen model cannot be "
        r"initialised by tracing it; call the model with the batch's inputs"
    )
    with pytest.raises(TypeError, match=message):
        network.init(KEY)


def test_partition_spec_as_names_is_read_as_names():
    def factory(rngs):
        return nnx.Dict(w=nnx.Param(jnp.ones((2, 4)), out_sharding=P(None, "tensor")))

    network = make_network(factory, no_loss, BATCH)
    assert network.dim_names() == {"w": (None, "tensor")}
