"""Does a mixture of experts compute what its definition says?"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models.experts.config import ExpertsConfig
from jaxpar.models.experts.layer import Experts
from jaxpar.models.mlp import activate, is_gated

B, T, D, F = 4, 6, 8, 10
CONFIG = ExpertsConfig(num=4, top_k=2)


def made(config: ExpertsConfig, activation: str = "swiglu", bias: bool = False) -> Any:
    how = {"activation": activation, "bias": bias, "output_stddev": 0.5}
    module: Any = Experts(D, F, config, **how, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for part in (module.up, module.gate, *biases_of(module)):
        if part is not None:
            part[...] = jnp.asarray(rng.normal(size=part.shape), jnp.float32)
    module.router.kernel[...] *= 50
    return module


def biases_of(module: Any) -> list[Any]:
    return [module.up_bias, module.gate_bias, module.down_bias]


def inputs() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(B, T, D)), jnp.float32)


def expert(module: Any, e: int, x: jax.Array) -> jax.Array:
    up = x @ module.up[e]
    gate = x @ module.gate[e] if is_gated(module.activation) else None
    if module.gate_bias is not None:
        gate = gate + module.gate_bias[e]
    if module.up_bias is not None:
        up = up + module.up_bias[e]
    out = activate(module.activation, up, gate) @ module.down[e]
    return out if module.down_bias is None else out + module.down_bias[e]


def plainly(module: Any, x_BTD: jax.Array, kept: np.ndarray | None = None):
    """Every token by itself; `kept` says which choices are computed."""
    flat = x_BTD.reshape(-1, D)
    probs = jax.nn.softmax(flat @ module.router.kernel[...])
    gates, experts = jax.lax.top_k(probs, module.config.top_k)
    if module.config.normalise_gates:
        gates = gates / gates.sum(-1, keepdims=True)
    out = jnp.zeros_like(flat)
    for k in range(module.config.top_k):
        every = jnp.stack([expert(module, e, flat) for e in range(module.config.num)])
        own = every[experts[:, k], jnp.arange(len(flat))]
        mask = 1.0 if kept is None else jnp.asarray(kept)[:, k, None]
        out = out + own * gates[:, k, None] * mask
    if module.shared is not None:
        shared = module.shared(x_BTD).reshape(-1, D)
        scale = jax.nn.sigmoid(flat @ module.shared_gate.kernel[...])
        out = out + scale * shared
    return out.reshape(x_BTD.shape), np.asarray(experts)


CASES: dict[str, tuple[ExpertsConfig, str, bool]] = {
    "gated": (CONFIG, "swiglu", False),
    "plain, biases": (dataclasses.replace(CONFIG, top_k=1), "gelu", True),
    "shared": (
        ExpertsConfig(
            num=4, top_k=3, normalise_gates=False, shared_width=6, shared_gate=True
        ),
        "geglu",
        True,
    ),
    "room for all": (dataclasses.replace(CONFIG, capacity_factor=9.0), "swiglu", True),
}


@pytest.mark.parametrize("name", CASES)
def test_without_drops_it_is_each_token_by_itself(name: str) -> None:
    config, activation, bias = CASES[name]
    module = made(config, activation, bias)
    graphdef, state = nnx.split(module)

    def ours(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(x)[0]

    def theirs(state: Any, x: jax.Array) -> jax.Array:
        return plainly(nnx.merge(graphdef, state), x)[0]

    found = []
    for fn in (ours, theirs):
        out, pull = jax.vjp(fn, state, inputs())
        found.append([out, *jax.tree.leaves(pull(jnp.cos(out)))])
    for own, right in zip(*found, strict=True):
        np.testing.assert_allclose(own, right, rtol=1e-4, atol=1e-4)
    statistics = module(inputs())[1]
    assert float(statistics.dropped) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("group_rows", [1, 2])
def test_with_capacity_later_choices_of_a_group_are_dropped(group_rows: int) -> None:
    config = dataclasses.replace(CONFIG, capacity_factor=0.7, group_rows=group_rows)
    module = made(config)
    _, experts = plainly(module, inputs())
    kept = np.zeros(experts.shape, bool)
    size = group_rows * T
    for first in range(0, B * T, size):
        taken = np.zeros(4, int)
        for k in range(2):
            for n in range(first, first + size):
                kept[n, k] = taken[experts[n, k]] < config.capacity(size)
                taken[experts[n, k]] += 1
    update, statistics = module(inputs())
    np.testing.assert_allclose(update, plainly(module, inputs(), kept)[0], atol=1e-4)
    assert 0.05 < 1 - kept.mean() < 0.6
    assert float(statistics.dropped) == pytest.approx(1 - kept.mean(), rel=1e-5)


def test_padding_gets_no_update_and_takes_no_place() -> None:
    for factor in (None, 0.9):
        config = dataclasses.replace(CONFIG, capacity_factor=factor)
        module = made(config)
        is_token = jnp.arange(T) < jnp.array([T, 3, 5, 2])[:, None]
        noise = jnp.where(is_token[..., None], inputs(), 100.0)
        update, statistics = module(inputs(), is_token)
        assert not np.asarray(update)[~np.asarray(is_token)].any()
        again, same = module(noise, is_token)
        np.testing.assert_array_equal(update, again)
        np.testing.assert_array_equal(statistics, same)


def test_groups_that_do_not_fit_the_rows_are_named() -> None:
    config = dataclasses.replace(CONFIG, capacity_factor=1.0, group_rows=3)
    with pytest.raises(ValueError, match="group_rows=3 must divide the 4 rows"):
        made(config)(inputs())
