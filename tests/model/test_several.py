"""Are several models one network: nested by name, each in its mode, with its state?"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpar
from jaxpar.model.several import Models, SeveralNetworks, make_networks
from jaxpar.tree import named_leaves

KEY, X = jax.random.key(0), jnp.ones((4, 3))


class Counting(nnx.Module):
    """Counts its calls, and drops."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        self.inner = nnx.Linear(3, width, param_dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.float32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        return self.dropout(self.inner(x))


class Dense(nn.Module):
    features: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.features)(x)


def both(models: Any, x: jax.Array) -> jax.Array:
    return models["a"](x).sum() + models["b"](x).sum()


def of(models: dict[str, Any], *losses: Any, **options: Any) -> SeveralNetworks:
    losses = losses or (both,)
    made = make_networks(models, losses, [X] * len(losses))
    return SeveralNetworks(made, **{"copies": {}, **options})


PAIR = {
    "a": lambda rngs: Counting(5, rngs),
    "b": lambda rngs: Counting(5, rngs, jnp.bfloat16),
}


def test_parameters_state_and_names_are_nested_by_model():
    network = of(PAIR)
    params, state = network.init(KEY)
    assert list(named_leaves(params)) == [
        f"{model}/inner/{leaf}" for model in "ab" for leaf in ("bias", "kernel")
    ]
    assert list(named_leaves(state)) == ["a/calls", "b/calls"]
    assert set(network.dim_names()) == set(named_leaves(params))
    assert network.variable_types()["b/inner/kernel"] is nnx.Param
    twins, _ = of({"a": PAIR["a"], "b": PAIR["a"]}).init(KEY)
    kernels = [np.asarray(twins[model]["inner"]["kernel"]) for model in "ab"]
    assert np.abs(kernels[0] - kernels[1]).max() > 0.05, "each has its own key"


def test_copy_begins_as_the_other_in_its_own_dtype():
    params, _ = of(PAIR, copies={"b": "a"}).init(KEY)
    kernels = [params[model]["inner"]["kernel"] for model in "ab"]
    assert kernels[1].dtype == jnp.bfloat16
    np.testing.assert_array_equal(kernels[0].astype(jnp.bfloat16), kernels[1])
    other = {**PAIR, "b": lambda rngs: Counting(6, rngs)}
    message = r"init_from: 'b' begins as a copy of 'a', but they differ in inner/"
    with pytest.raises(ValueError, match=message):
        of(other, copies={"b": "a"}).init(KEY)


def test_modes_and_state_are_each_models_own():
    """Two trained models, of which a loss keeps the state of one; an average."""
    seen = {}

    def loss(models: Any, x: jax.Array) -> jax.Array:
        for name in models:
            outs = [models[name](x) for _ in range(2)]
            seen[name] = bool(jnp.any(outs[0] != outs[1]))
        return both(models, x)

    options: dict[str, Any] = {
        "averages": {"slow": "a"},
        "in_training": frozenset({"a"}),
        "kept": frozenset({"a"}),
    }
    network = of(PAIR, **options)
    variables = network.init(KEY)
    assert "slow" in variables[0]
    assert "slow" not in variables[1]
    _, state = network.run(loss, variables, KEY, X, training=True)
    assert seen == {"a": True, "b": False, "slow": False}
    assert float(state["a"]["calls"]) == 3
    assert float(state["b"]["calls"]) == 0
    network.run(loss, variables, KEY, X, training=False)
    assert not any(seen.values())


def test_linen_models_are_initialised_by_any_of_the_losses():
    models = {"a": Dense(), "b": PAIR["b"], "c": Dense(7)}

    def third(models: Any, x: jax.Array) -> jax.Array:
        return models["c"](models["a"](x)).sum()

    params, _ = of(models, both, third).init(KEY)
    assert params["a"]["Dense_0"]["kernel"].shape == (3, 2)
    assert params["c"]["Dense_0"]["kernel"].shape == (2, 7)
    with pytest.raises(TypeError, match="never called"):
        of(models, both).init(KEY)


def pipeline(width: int) -> jaxpar.PipelineModel:
    def linear(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(width, width, rngs=rngs)

    return jaxpar.PipelineModel(embed=linear, sections=[(linear, 2)], head=linear)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_pipeline_model_may_be_called_with_anothers_result(order):
    def chained(models: Any, x: jax.Array) -> jax.Array:
        return models["b"](models["a"](x)).sum()

    models = {name: pipeline(3) for name in order}
    params, _ = of(models, chained).init(KEY)
    assert list(params) == list(order)


def test_unknown_model_is_named():
    with pytest.raises(KeyError, match=r"no model 'bb'; the models are 'a', 'b'"):
        Models({"a": 1, "b": 2})["bb"]
