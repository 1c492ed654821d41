import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxpar.model.remat import (
    BLOCK_INPUT,
    REMAT_POLICIES,
    label_inputs,
    passed_on,
    remat,
    remat_block,
)

WEIGHT = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)
INPUT = jnp.linspace(0.1, 0.9, 12).reshape(3, 4)


def two_products(x: jax.Array, weight: jax.Array) -> jax.Array:
    hidden = checkpoint_name(jnp.tanh(x @ weight), "hidden")
    return jnp.sum(jnp.sin(hidden @ weight))


def names_for(policy: str) -> tuple[str, ...]:
    return ("hidden",) if policy in ("save-names", "offload") else ()


def primitives_of_backward(policy: str) -> list[str]:
    """Return the names of what the linear part of `two_products` computes."""
    fn = remat(two_products, policy, names=names_for(policy))
    _, vjp = jax.vjp(fn, INPUT, WEIGHT)
    text = str(jax.make_jaxpr(vjp)(1.0))
    return [word for word in ("dot_general", "tanh", "sin", "cos") if f"{word}" in text]


def saved_shapes(policy: str) -> list[tuple[int, ...]]:
    """Return the shapes of what the forward pass keeps besides its arguments."""
    fn = remat(two_products, policy, names=names_for(policy))
    _, vjp = jax.vjp(fn, INPUT, WEIGHT)
    arguments = {id(INPUT), id(WEIGHT)}
    kept = [leaf for leaf in jax.tree.leaves(vjp) if id(leaf) not in arguments]
    known = [np.asarray(INPUT), np.asarray(WEIGHT)]
    return [
        leaf.shape
        for leaf in kept
        if not any(np.array_equal(leaf, argument) for argument in known)
    ]


@pytest.mark.parametrize("policy", REMAT_POLICIES)
def test_remat_keeps_value_and_gradients(policy: str):
    fn = remat(two_products, policy, names=names_for(policy))
    value, grads = jax.value_and_grad(fn, argnums=(0, 1))(INPUT, WEIGHT)
    want_value, want = jax.value_and_grad(two_products, argnums=(0, 1))(INPUT, WEIGHT)
    assert value == pytest.approx(float(want_value), rel=1e-6)
    for grad, expected in zip(grads, want, strict=True):
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)


def test_remat_none_returns_the_function_itself():
    assert remat(two_products, "none") is two_products


def test_remat_saves_what_its_policy_says():
    assert saved_shapes("full") == []
    # The results of both products; their inputs are recomputed from them.
    assert saved_shapes("dots") == [(3, 4), (3, 4)]
    assert saved_shapes("save-names") == [(3, 4)]
    assert len(saved_shapes("none")) > len(saved_shapes("dots"))


def test_remat_unknown_policy_names_the_near_one():
    with pytest.raises(
        ValueError,
        match=r"policy='dot' must be one of 'none', 'full', 'dots', 'save-names', "
        r"'offload'\. Did you mean 'dots'\?",
    ):
        remat(two_products, "dot")


def test_remat_save_names_without_names_raises():
    with pytest.raises(ValueError, match=r"names=\(\) would save nothing"):
        remat(two_products, "save-names")


def test_remat_names_under_another_policy_raises():
    with pytest.raises(
        ValueError, match=r"names=\('hidden',\) must be empty under policy='full'"
    ):
        remat(two_products, "full", names=("hidden",))


def encoded(layers: jax.Array, x: jax.Array, memory: jax.Array, wrap: Any) -> jax.Array:
    """A loop over blocks that read what another part of the model has made."""

    def block(weight: jax.Array, hidden: dict) -> tuple[dict, None]:
        read = jnp.tanh(hidden["x"] @ weight) + hidden["memory"].sum(0)
        return hidden | {"x": jnp.sin(read)}, None

    def step(hidden: dict, weight: jax.Array) -> tuple[dict, None]:
        return wrap(block)(weight, hidden)

    hidden, _ = jax.lax.scan(step, {"x": x, "memory": memory}, layers)
    return (hidden["x"] * hidden["memory"].sum(0)).sum()


@pytest.mark.parametrize("policy", REMAT_POLICIES)
def test_a_loop_stores_what_its_blocks_pass_on_once(policy: str):
    layers, memory = jnp.stack([WEIGHT, -WEIGHT, WEIGHT + 1]), jnp.ones((7, 4))
    how = {"names": names_for(policy), "prevent_cse": False}

    def grad_by(wrapped: Any) -> Any:
        wrap = functools.partial(wrapped, policy=policy, **how)
        loss = functools.partial(encoded, wrap=wrap)
        return jax.value_and_grad(loss, argnums=(0, 1, 2))

    value, grads = grad_by(remat_block)(layers, INPUT, memory)
    want_value, want = jax.value_and_grad(
        functools.partial(encoded, wrap=lambda block: block), argnums=(0, 1, 2)
    )(layers, INPUT, memory)
    assert value == pytest.approx(float(want_value), rel=1e-6)
    for grad, expected in zip(grads, want, strict=True):
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)

    def stacked(wrapped: Any) -> bool:
        program = str(jax.make_jaxpr(grad_by(wrapped))(layers, INPUT, memory))
        return "f32[3,7,4]" in program

    assert not stacked(remat_block)
    assert stacked(remat) == (policy != "none"), "the test can see it"


def test_remat_offload_without_names_raises():
    with pytest.raises(ValueError, match=r"names=\(\) would move nothing to the host"):
        remat(two_products, "offload")


def test_remat_offload_stores_what_is_labelled_on_the_host():
    fn = remat(two_products, "offload", names=("hidden",))
    text = str(jax.make_jaxpr(lambda x: jax.vjp(fn, x, WEIGHT)[1](1.0))(INPUT))
    assert "f32<host>[3,4] = device_put[" in text
    assert text.count("MemorySpace.Host") == 1


def test_input_is_labelled_but_for_what_is_passed_on():
    def block(given):
        return {"hidden": given["hidden"] + 1, "memory": given["memory"]}

    given = {"hidden": INPUT, "memory": INPUT, "number": jnp.int32(1)}
    passed = passed_on(lambda x: block(x) | {"number": x["number"]}, given)
    assert passed == {1, 2}
    text = str(jax.make_jaxpr(lambda x: label_inputs(x, passed))(given))
    assert text.count(f"name={BLOCK_INPUT}") == 1
