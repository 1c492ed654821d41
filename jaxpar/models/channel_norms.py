"""The normalisations of convolutions: over a batch, or over groups of channels.

Batch statistics couple the rows of a batch, so the engine gives a model that has them
full micro-batches, and its pipeline refuses it; statistics of groups are of one row.
As in `jaxpar.models.norms`, statistics are in fp32, and a norm keeps its input and its
statistics for the backward pass.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpar.models.layers import named_param


class GroupNorm(nnx.Module):
    """Normalise each row's groups of channels to mean 0 and variance 1; scale, shift.

    Args:
      width: channels.
      num_groups: into which they are divided; divides `width`. A multiple of the tensor
        axis where the channels are sharded, so that a group is on one device.
      epsilon: added to the variance.
      name: logical name of the channels.

    Raises:
      ValueError: if `num_groups` does not divide `width`.

    Source: Wu, He, "Group Normalization" (2018).
    """

    def __init__(
        self,
        width: int,
        num_groups: int,
        *,
        epsilon: float = 1e-5,
        name: str | None = "embed",
    ):
        if num_groups < 1 or width % num_groups:
            raise ValueError(
                f"GroupNorm: num_groups={num_groups} must divide width={width}; use "
                f"{math.gcd(num_groups, width)}."
            )
        self.scale = named_param(jnp.ones(width), (name,))
        self.bias = named_param(jnp.zeros(width), (name,))
        self.num_groups, self.epsilon = num_groups, epsilon

    def __call__(self, x_BHWC: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        """Normalise.

        Args:
          x_BHWC: maps of features.

        Returns:
          The same shape and dtype.
        """
        groups = self.num_groups, x_BHWC.shape[-1] // self.num_groups
        found: tuple[jax.Array, ...] = _normalise(
            (1, 2, 4),
            self.epsilon,
            x_BHWC.reshape(*x_BHWC.shape[:3], *groups),
            self.scale[...].reshape(groups),
            self.bias[...].reshape(groups),
        )
        return found[0].reshape(x_BHWC.shape)


class BatchNorm(nnx.Module):
    """Normalise each channel over a batch and its places; scale, shift.

    Training uses the batch's statistics and averages them: ``mean = decay mean + (1 -
    decay) batch_mean``, and so the variance, of n - 1 degrees of freedom. Evaluation
    uses the averages.

    Args:
      width: channels.
      epsilon: added to the variance.
      decay: of the averages, for each micro-batch.
      name: logical name of the channels.

    Source: Ioffe, Szegedy, "Batch Normalization" (2015), algorithms 1 and 2.
    """

    def __init__(
        self,
        width: int,
        *,
        epsilon: float = 1e-5,
        decay: float = 0.9,
        name: str | None = "embed",
    ):
        self.scale = named_param(jnp.ones(width), (name,))
        self.bias = named_param(jnp.zeros(width), (name,))
        self.mean = nnx.BatchStat(jnp.zeros(width))
        self.variance = nnx.BatchStat(jnp.ones(width))
        self.epsilon, self.decay = epsilon, decay
        # `nnx.Module.eval` sets it.
        self.use_running_average = False

    def __call__(self, x_BHWC: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        """Normalise; in training also average the statistics.

        Args:
          x_BHWC: maps of features.

        Returns:
          The same shape and dtype.
        """
        scale, bias = self.scale[...], self.bias[...]
        if self.use_running_average:
            inverse = jax.lax.rsqrt(self.variance[...] + self.epsilon)
            y = (_wide(x_BHWC) - self.mean[...]) * inverse * scale + bias
            return y.astype(x_BHWC.dtype)
        given = (0, 1, 2), self.epsilon, x_BHWC, scale, bias
        found: tuple[jax.Array, ...] = _normalise(*given)
        y, mean, variance = found
        number = math.prod(x_BHWC.shape[:3])
        self._average(self.mean, mean)
        self._average(self.variance, variance * (number / max(number - 1, 1)))
        return y

    def _average(self, average: nnx.BatchStat, value: jax.Array) -> None:
        own = jax.lax.stop_gradient(value.reshape(-1))
        average.set_value(self.decay * average[...] + (1 - self.decay) * own)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalise(
    dims: tuple[int, ...],
    epsilon: float,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The result, mean and variance over `dims`; only the result has a gradient."""
    return _normalise_forward(dims, epsilon, x, scale, bias)[0]


def _normalise_forward(
    dims: tuple[int, ...],
    epsilon: float,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple]:
    mean = _wide(x).mean(dims, keepdims=True)
    variance = jnp.square(_wide(x) - mean).mean(dims, keepdims=True)
    inverse = jax.lax.rsqrt(variance + epsilon)
    y = ((_wide(x) - mean) * inverse * scale + bias).astype(x.dtype)
    return (y, mean, variance), (x, scale, bias[:0], mean, inverse)


def _normalise_backward(
    dims: tuple[int, ...],
    epsilon: float,
    saved: tuple,
    cotangents: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    del epsilon
    x, scale, empty, mean, inverse = saved
    cotangent = _wide(cotangents[0])
    normal, grad = (_wide(x) - mean) * inverse, cotangent * scale
    along = (grad * normal).mean(dims, keepdims=True)
    grad_x = (grad - grad.mean(dims, keepdims=True) - normal * along) * inverse
    rows = tuple(range(x.ndim - scale.ndim))
    grad_scale = (cotangent * normal).sum(rows).astype(scale.dtype)
    return grad_x.astype(x.dtype), grad_scale, cotangent.sum(rows).astype(empty.dtype)


_normalise.defvjp(_normalise_forward, _normalise_backward)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
