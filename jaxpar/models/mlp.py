"""The MLP of a transformer's block: two matmuls around an activation, or three."""

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxpar.mesh import DATA, TENSOR
from jaxpar.models.layers import Linear
from jaxpar.sharding.constrain import constrain

Activation = Callable[[jax.Array], jax.Array]

_PLAIN: dict[str, Activation] = {
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}
_GATED: dict[str, Activation] = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}

ACTIVATIONS = (*_PLAIN, *_GATED)
"""Names of activations: "gelu" is by tanh, "gelu_exact" by the error function; "swiglu"
and "geglu" (by tanh) are gated.
"""


def is_gated(activation: str) -> bool:
    """Whether an MLP with an activation has a gate, a third matmul."""
    return activation in _GATED


class MLP(nnx.Module):
    """Two matmuls around an activation, or three around a gated one.

    Args:
      width: features in and out.
      hidden: features inside.
      activation: one of `ACTIVATIONS`.
      bias: whether the matmuls have one.
      stddev: of the kernels before the last.
      output_stddev: of the last kernel, which adds to the residual stream.
      flatten: as in `jaxpar.models.layers.Linear`.
      rngs: for the ``params`` stream.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), for the gates.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str,
        bias: bool,
        stddev: float = 0.02,
        output_stddev: float,
        flatten: bool = True,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        dense = functools.partial(Linear, bias=bias, flatten=flatten, rngs=rngs)
        gated = is_gated(activation)
        first = functools.partial(dense, (width, hidden), ("embed", "mlp"))
        self.gate = first(stddev=stddev) if gated else None
        self.up = first(stddev=stddev)
        self.down = dense((hidden, width), ("mlp", "embed"), stddev=output_stddev)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Run the MLP.

        Args:
          x_BTD: normalised residual stream.

        Returns:
          The update of the residual stream.
        """
        up_BTF = self._labelled(self.up.multiply(x_BTD))
        bias_F = None if self.up.bias is None else self.up.bias[...]
        gate_BTF = None if self.gate is None else self._labelled(self.gate(x_BTD))
        return self.down(activate(self.activation, up_BTF, gate_BTF, bias_F))

    @staticmethod
    def _labelled(hidden_BTF: jax.Array) -> jax.Array:
        return constrain(checkpoint_name(hidden_BTF, "mlp_hidden"), DATA, None, TENSOR)


def activate(
    activation: str,
    up_BTF: Float[Array, "*dims F"],
    gate_BTF: Float[Array, "*dims F"] | None = None,
    bias_F: Float[Array, "*of_up"] | None = None,
) -> Float[Array, "*dims F"]:
    """Activate an MLP's hidden features, and keep the arguments alone.

    Args:
      activation: one of `ACTIVATIONS`.
      up_BTF: the first matmul's result.
      gate_BTF: the gate's, of a gated activation.
      bias_F: is added to `up_BTF`; None for none.

    Returns:
      The input of the last matmul.
    """
    if gate_BTF is None:
        return _activated(activation, up_BTF, bias_F)
    up_BTF = up_BTF if bias_F is None else up_BTF + bias_F
    return _gated(activation, gate_BTF, up_BTF)


# Recomputed in the backward pass from the matmul's result: as written, gelu would save
# four arrays of [B, T, F]. The bias is added here, or the sum would be another array.
def _biased(name: str, up_BTF: jax.Array, bias_F: jax.Array | None) -> jax.Array:
    return _PLAIN[name](up_BTF if bias_F is None else up_BTF + bias_F)


_activated = jax.custom_vjp(_biased, nondiff_argnums=(0,))


def _activated_forward(
    name: str, up_BTF: jax.Array, bias_F: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    return _biased(name, up_BTF, bias_F), (up_BTF, bias_F)


def _activated_backward(
    name: str, saved: tuple[jax.Array, jax.Array | None], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    up_BTF, bias_F = saved
    # So that XLA does not keep what the forward pass has computed.
    up_BTF = jax.lax.optimization_barrier(up_BTF)
    return jax.vjp(functools.partial(_biased, name), up_BTF, bias_F)[1](cotangent)


_activated.defvjp(_activated_forward, _activated_backward)


@functools.partial(jax.checkpoint, static_argnums=0)
def _gated(name: str, gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    return _GATED[name](gate_BTF) * up_BTF
