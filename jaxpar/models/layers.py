"""The layers of the models: matmuls, normalisations, embeddings.

Every parameter has the logical names of its dims in Flax's ``out_sharding`` metadata.
Rules map them to mesh axes later, so a layer can be made without a mesh. Parameters are
made in fp32; a layer computes in the dtype that its parameters have.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.mesh import DATA
from jaxpar.sharding.constrain import constrain
from jaxpar.sharding.tensor import VOCAB

Names = tuple[str | None, ...]


def named_param(value: jax.Array, names: Names) -> nnx.Param:
    """Make a parameter whose dims have logical names.

    Args:
      value: the initial value.
      names: one logical name per dim; None for a dim that is never sharded.

    Returns:
      A parameter with the names in its ``out_sharding`` metadata.

    Raises:
      ValueError: if there is not one name per dim.

    Example:
      >>> named_param(jnp.ones((2, 3)), ("embed", "mlp")).get_metadata("out_sharding")
      ('embed', 'mlp')
    """
    if len(names) != value.ndim:
        raise ValueError(
            f"named_param: names={names} has {len(names)} entries for an array of "
            f"{value.ndim} dims (shape {value.shape}); give one name per dim, None "
            "for a dim that is never sharded."
        )
    # Flax would place the value at once, and require a mesh with axes of these names;
    # these are logical, and the owner of the mesh places the parameters.
    return nnx.Param(value, out_sharding=names, eager_sharding=False)


class Linear(nnx.Module):
    """A matmul over the last dim: ``x @ kernel + bias``.

    The kernel [in, out] is drawn from a normal distribution; the bias starts at zero.

    Args:
      shape: features in and out.
      names: logical names of the two dims; the bias takes the second.
      bias: whether there is a bias.
      stddev: of the kernel.
      flatten: merge leading dims into one around the matmul. XLA:CPU takes about twice
        as long for the weight gradient of a 3-D activation. Use False where two leading
        dims are sharded on different mesh axes, because a merged dim can be sharded on
        only one of them.
      rngs: for the ``params`` stream.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        names: tuple[str | None, str | None],
        *,
        bias: bool = True,
        stddev: float = 0.02,
        flatten: bool = True,
        rngs: nnx.Rngs,
    ):
        kernel = stddev * jax.random.normal(rngs.params(), shape)
        self.kernel = named_param(kernel, names)
        self.bias = named_param(jnp.zeros(shape[1]), names[1:]) if bias else None
        self.flatten = flatten

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims F"]:
        """Multiply.

        Args:
          x: [..., in].

        Returns:
          [..., out].
        """
        product = _flat_product if self.flatten else jnp.matmul
        y = product(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...]


class LayerNorm(nnx.Module):
    """Normalise the last dim to mean 0 and variance 1, then scale and shift.

    Statistics are in fp32, the result in the input's dtype.

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
        return _layer_norm(x, self.scale[...], bias, self.epsilon)


class RMSNorm(nnx.Module):
    """Divide the last dim by its root mean square, then scale.

    Statistics are in fp32, the result in the input's dtype.

    Args:
      width: size of the last dim.
      epsilon: added to the mean square.

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019).
    """

    def __init__(self, width: int, *, epsilon: float = 1e-5):
        self.scale = named_param(jnp.ones(width), ("embed",))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims D"]:
        """Normalise.

        Args:
          x: [..., width].

        Returns:
          The same shape and dtype.
        """
        return _rms_norm(x, self.scale[...], self.epsilon)


class Embedding(nnx.Module):
    """A table with a row for every token (or position).

    Rows are drawn from a normal distribution of standard deviation 0.02.

    Args:
      shape: rows and width.
      names: logical names of the two dims.
      rngs: for the ``params`` stream.
    """

    def __init__(self, shape: tuple[int, int], names: Names, *, rngs: nnx.Rngs):
        self.table = named_param(0.02 * jax.random.normal(rngs.params(), shape), names)

    def __call__(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Look rows up.

        Args:
          tokens_BT: row numbers. One that is not below the number of rows gives NaN, so
            that a wrong vocabulary shows in the first loss.

        Returns:
          The rows.
        """
        return self.table[...].at[tokens_BT].get(mode="fill", fill_value=jnp.nan)


# Here and in the norms, the backward pass recomputes from the inputs. As written, each
# matmul would save its own reshaped copy of an input that several share, and a norm
# three fp32 copies of its input; a scan stacks all of them, layer by layer.
@jax.checkpoint
def _flat_product(x: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    return (rows @ kernel_DF).reshape(*x.shape[:-1], -1)


@functools.partial(jax.checkpoint, static_argnums=3)
def _layer_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array | None, epsilon: float
) -> jax.Array:
    wide = _at_least_fp32(x)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + epsilon) * scale
    return (y if bias is None else y + bias).astype(x.dtype)


@functools.partial(jax.checkpoint, static_argnums=2)
def _rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    wide = _at_least_fp32(x)
    mean_square = jnp.square(wide).mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + epsilon) * scale).astype(x.dtype)


def _at_least_fp32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def project_to_logits(
    x_BTD: Float[Array, "B T D"],
    kernel_DV: Float[Array, "D V"],
    *,
    flatten: bool = True,
) -> Float[Array, "B T V"]:
    """Multiply in the operands' dtype, with fp32 results.

    Rounded to bf16, logits around 20 would be 0.06 apart. The backward pass rounds
    the cotangent to the operands' dtype first: in fp32 both of its matmuls would run at
    fp32 speed.

    Args:
      x_BTD: activations.
      kernel_DV: the head, or the transposed embedding table.
      flatten: as in `Linear`.

    Returns:
      Logits, fp32, with the vocabulary sharded over tensor (and pipe).
    """
    is_half = x_BTD.dtype in (jnp.bfloat16, jnp.float16)
    product = _half_product if is_half else jnp.matmul
    rows = x_BTD.reshape(-1, x_BTD.shape[-1]) if flatten else x_BTD
    logits_BTV = product(rows, kernel_DV).reshape(*x_BTD.shape[:-1], -1)
    return constrain(logits_BTV, DATA, None, VOCAB)


@jax.custom_vjp
def _half_product(x: jax.Array, kernel_DV: jax.Array) -> jax.Array:
    return jnp.matmul(x, kernel_DV, preferred_element_type=jnp.float32)


def _half_product_forward(
    x: jax.Array, kernel_DV: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _half_product(x, kernel_DV), (x, kernel_DV)


def _half_product_backward(
    saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel_DV = saved
    cotangent = cotangent.astype(x.dtype)
    kernel_cotangent_DV = jnp.einsum("...d,...v->dv", x, cotangent)
    return cotangent @ kernel_DV.T, kernel_cotangent_DV


_half_product.defvjp(_half_product_forward, _half_product_backward)
