"""Does an MLP compute its activation, and save little for the backward pass?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models.mlp import ACTIVATIONS, MLP, is_gated

PLAINLY: dict[str, Any] = {
    "gelu": jax.nn.gelu,
    "gelu_exact": lambda x: x * 0.5 * (1 + jax.scipy.special.erf(x / 2**0.5)),
    "relu": lambda x: jnp.maximum(x, 0),
    "swiglu": lambda x: x / (1 + jnp.exp(-x)),
    "geglu": jax.nn.gelu,
}


def made(activation: str) -> Any:
    how = {"activation": activation, "bias": True, "output_stddev": 0.5}
    return MLP(6, 10, **how, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_is_its_definition(activation: str):
    module = made(activation)
    rng = np.random.default_rng(0)
    for part in (module.gate, module.up, module.down):
        if part is not None:
            own = rng.normal(size=part.bias.shape)
            part.bias[...] = jnp.asarray(own, jnp.float32)
            part.kernel[...] *= 10
    graphdef, state = nnx.split(module)
    x = jnp.asarray(rng.normal(size=(2, 3, 6)), jnp.float32)

    def plainly(state: Any, x: jax.Array) -> jax.Array:
        m = nnx.merge(graphdef, state)
        up = x @ m.up.kernel[...] + m.up.bias[...]
        if is_gated(activation):
            gate = x @ m.gate.kernel[...] + m.gate.bias[...]
            hidden = PLAINLY[activation](gate) * up
        else:
            hidden = PLAINLY[activation](up)
        return hidden @ m.down.kernel[...] + m.down.bias[...]

    found = []
    for fn in (lambda s, x: nnx.merge(graphdef, s)(x), plainly):
        out, pull = jax.vjp(jax.jit(fn), state, x)
        found.append([out, *jax.tree.leaves(pull(jnp.cos(out)))])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["gelu", "gelu_exact", "relu"])
def test_the_backward_pass_keeps_one_array_of_hidden_features(activation: str):
    module = made(activation)
    graphdef, state = nnx.split(module)
    x = jnp.ones((4, 5, 6))
    _, pull = jax.vjp(lambda s, x: nnx.merge(graphdef, s)(x), state, x)
    hidden = 4 * 5 * 10
    # The matmul's result, and the activation's, which the next matmul needs.
    assert sum(leaf.size == hidden for leaf in jax.tree.leaves(pull)) <= 2


def test_kernels_have_their_standard_deviations():
    how = {"activation": "geglu", "bias": False, "stddev": 0.3, "output_stddev": 0.1}
    module: Any = MLP(64, 96, **how, rngs=nnx.Rngs(0))
    kernels = (module.gate.kernel, module.up.kernel, module.down.kernel)
    found = [float(kernel[...].std()) for kernel in kernels]
    assert found == pytest.approx([0.3, 0.3, 0.1], rel=0.05)
