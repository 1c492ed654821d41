"""The normalisations of the models, each one kernel forward and two backward.

Statistics are in fp32, the result in the input's dtype. A norm keeps its input and its
statistics, a number or two for each row, for the backward pass: as automatic
differentiation would write it, it keeps three fp32 copies of its input.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpar.models.layers import named_param

Moments = tuple[jax.Array, jax.Array]


class LayerNorm(nnx.Module):
    """Normalise the last dim to mean 0 and variance 1, then scale and shift.

    Args:
      width: size of the last dim.
      bias: whether there is a shift.
      epsilon: added to the variance.

    Source: Ba, Kiros, Hinton, "Layer Normalization" (2016).
    """

    def __init__(self, width: int, *, bias: bool = True, epsilon: float = 1e-5):
        self.scale = named_param(jnp.ones(width), ("embed",))
        self.bias = named_param(jnp.zeros(width), ("embed",)) if bias else None
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims D"]:
        """Normalise.

        Args:
          x: [..., width].

        Returns:
          The same shape and dtype.
        """
        bias = None if self.bias is None else self.bias[...]
        return _layer_norm(self.epsilon, x, self.scale[...], bias)


class RMSNorm(nnx.Module):
    """Divide the last dim by its root mean square, then scale.

    Args:
      width: size of the last dim.
      epsilon: added to the mean square.
      plus_one: whether one plus the parameter scales, as in Gemma: decay then pulls
        towards 1.
      name: logical name of the dim.

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019).
    """

    def __init__(
        self,
        width: int,
        *,
        epsilon: float = 1e-5,
        plus_one: bool = False,
        name: str | None = "embed",
    ):
        value = jnp.zeros(width) if plus_one else jnp.ones(width)
        self.scale = named_param(value, (name,))
        self.epsilon, self.plus_one = epsilon, plus_one

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims D"]:
        """Normalise.

        Args:
          x: [..., width].

        Returns:
          The same shape and dtype.
        """
        scale = self.scale[...]
        return _rms_norm(self.epsilon, x, _wide(scale) + 1 if self.plus_one else scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm(
    epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array | None
) -> jax.Array:
    return _layer_norm_forward(epsilon, x, scale, bias)[0]


def _layer_norm_forward(
    epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, tuple]:
    moments = _moments(x)
    y = _centred(x, moments) * _inverse(moments[1], epsilon) * scale
    y = y if bias is None else y + bias
    return y.astype(x.dtype), (x, scale, bias, moments)


def _layer_norm_backward(
    epsilon: float, saved: tuple, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, scale, bias, moments = saved
    inverse = _inverse(moments[1], epsilon)
    normal, grad = _centred(x, moments) * inverse, _wide(cotangent) * scale
    along = (grad * normal).mean(-1, keepdims=True)
    grad_x = (grad - grad.mean(-1, keepdims=True) - normal * along) * inverse
    x, cotangent, rows = _for_sums_over_rows(x, cotangent)
    normal = _centred(x, moments) * inverse
    grad_scale = (_wide(cotangent) * normal).sum(rows).astype(scale.dtype)
    if bias is None:
        return grad_x.astype(x.dtype), grad_scale, None
    grad_bias = _wide(cotangent).sum(rows).astype(bias.dtype)
    return grad_x.astype(x.dtype), grad_scale, grad_bias


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(epsilon: float, x: jax.Array, scale: jax.Array) -> jax.Array:
    return _rms_norm_forward(epsilon, x, scale)[0]


def _rms_norm_forward(
    epsilon: float, x: jax.Array, scale: jax.Array
) -> tuple[jax.Array, tuple]:
    mean_square = jnp.square(_wide(x)).mean(-1, keepdims=True)
    y = _wide(x) * _inverse(mean_square, epsilon) * scale
    return y.astype(x.dtype), (x, scale, mean_square)


def _rms_norm_backward(
    epsilon: float, saved: tuple, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, scale, mean_square = saved
    inverse = _inverse(mean_square, epsilon)
    normal, grad = _wide(x) * inverse, _wide(cotangent) * scale
    along = (grad * normal).mean(-1, keepdims=True)
    grad_x = (grad - normal * along) * inverse
    x, cotangent, rows = _for_sums_over_rows(x, cotangent)
    grad_scale = (_wide(cotangent) * _wide(x) * inverse).sum(rows)
    return grad_x.astype(x.dtype), grad_scale.astype(scale.dtype)


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def _moments(x: jax.Array) -> Moments:
    """Mean and variance of each row."""
    wide = _wide(x)
    mean = wide.mean(-1, keepdims=True)
    if x.dtype.itemsize > 2:
        return mean, jnp.square(wide - mean).mean(-1, keepdims=True)
    # Both sums in one pass, with the addition to the residual stream before them. What
    # the difference loses in fp32 is far below what rounding to 16 bits has lost.
    mean_square = jnp.square(wide).mean(-1, keepdims=True)
    return mean, jnp.maximum(mean_square - jnp.square(mean), 0)


def _centred(x: jax.Array, moments: Moments) -> jax.Array:
    return _wide(x) - moments[0]


def _inverse(variance: jax.Array, epsilon: float) -> jax.Array:
    return jax.lax.rsqrt(variance + epsilon)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _for_sums_over_rows(
    x: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    """The same two arrays and the dims of their rows, for sums over the rows.

    Without the barrier XLA shares products with the sums over features, and writes
    them to memory in fp32.
    """
    x, cotangent = jax.lax.optimization_barrier((x, cotangent))
    return x, cotangent, tuple(range(x.ndim - 1))
