"""The layers of the models: matmuls and embeddings.

Every parameter has the logical names of its dims in Flax's ``out_sharding`` metadata.
Rules map them to mesh axes later, so a layer can be made without a mesh. Parameters are
made in fp32; a layer computes in the dtype that its parameters have.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.mesh import DATA
from jaxpar.sharding.constrain import constrain, rows_are_automatic
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
    `adapter`, if it is set, is called with `x`, and its result is added to the product
    (`jaxpar.models.lora`).

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

    adapter: Callable[[jax.Array], jax.Array] | None = None

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
        y = self.multiply(x)
        return y if self.bias is None else y + self.bias[...]

    def multiply(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims F"]:
        """The product alone, for what adds the bias itself."""
        product = multiply(x, self.kernel[...], flatten=self.flatten)
        return self.adapted(product, x)

    def adapted(self, product: jax.Array, x: jax.Array) -> jax.Array:
        """Add the adapter's update to the product of `x`."""
        return product if self.adapter is None else product + self.adapter(x)


class Embedding(nnx.Module):
    """A table with a row for every token (or position).

    Rows are drawn from a normal distribution.

    Args:
      shape: rows and width.
      names: logical names of the two dims.
      stddev: of the table.
      rngs: for the ``params`` stream.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        names: Names,
        *,
        stddev: float = 0.02,
        rngs: nnx.Rngs,
    ):
        table = stddev * jax.random.normal(rngs.params(), shape)
        self.table = named_param(table, names)

    def __call__(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Look rows up.

        Args:
          tokens_BT: row numbers. One that is not below the number of rows gives NaN, so
            that a wrong vocabulary shows in the first loss.

        Returns:
          The rows.
        """
        return self.table[...].at[tokens_BT].get(mode="fill", fill_value=jnp.nan)


def add_to_rows(
    x_BTD: Float[Array, "B T D"], y_TD: Float[Array, "T D"]
) -> Float[Array, "B T D"]:
    """Add an array to every row of a batch.

    Its gradient sums over the batch as a matmul, [1, B] x [B, T D]: for a reduction
    over the outermost dim, XLA:GPU stores the whole residual stream as [T, D, B].

    Args:
      x_BTD: the rows.
      y_TD: what is added to each, such as learned positions.

    Returns:
      The sums.
    """
    if rows_are_automatic():
        return x_BTD + y_TD  # Of the sum the compiler makes a reduce-scatter.
    return _add_to_rows(x_BTD, y_TD)


@jax.custom_vjp
def _add_to_rows(x_BTD: jax.Array, y_TD: jax.Array) -> jax.Array:
    return x_BTD + y_TD


def _add_to_rows_forward(
    x_BTD: jax.Array, y_TD: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return x_BTD + y_TD, y_TD[:0]


def _add_to_rows_backward(
    empty: jax.Array, cotangent_BTD: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rows = cotangent_BTD.reshape(cotangent_BTD.shape[0], -1)
    ones = jnp.ones((1, rows.shape[0]), rows.dtype)
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    total = jnp.matmul(ones, rows, preferred_element_type=wide)
    return cotangent_BTD, total.reshape(cotangent_BTD.shape[1:]).astype(empty.dtype)


_add_to_rows.defvjp(_add_to_rows_forward, _add_to_rows_backward)


def multiply(
    x: Float[Array, "*dims D"], kernel_DF: Float[Array, "D F"], *, flatten: bool
) -> Float[Array, "*dims F"]:
    """Multiply the last dim; `flatten` as in `Linear`."""
    return _flat_product(x, kernel_DF) if flatten else jnp.matmul(x, kernel_DF)


# The backward pass recomputes from the inputs. As written, each matmul would save its
# own reshaped copy of an input that several share, and a scan stacks all of them.
@jax.checkpoint
def _flat_product(x: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    return (rows @ kernel_DF).reshape(*x.shape[:-1], -1)


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
