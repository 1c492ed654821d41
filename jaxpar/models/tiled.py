"""Layers too large to be gathered whole: a loop over tiles of their kernels.

At ZeRO 3 a device gathers a layer to compute with it. A tiled layer stores its kernel
as a stack of tiles, over which it loops, and the engine gathers what a loop slices one
slice at a time: a device holds one tile, or two where the next is gathered ahead, and
the gradient of one.

Source: Rajbhandari et al., "ZeRO-Infinity" (2021), section 5.1.3 (memory-centric
tiling).
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpar.models.layers import multiply, named_param
from jaxpar.models.mlp import activate, is_gated

Names = tuple[str | None, str | None]


class TiledDense(nnx.Module):
    """A matmul over the last dim, ``x @ kernel + bias``, by tiles of its outputs.

    From one seed it has the kernel of `jaxpar.models.layers.Linear`, as a stack
    [tiles, in, out / tiles].

    Args:
      shape: features in and out.
      tiles: into which the outputs are cut; divides them.
      names: logical names of the two dims; the bias takes the second.
      bias: whether there is a bias.
      stddev: of the kernel.
      flatten: as in `jaxpar.models.layers.Linear`.
      rngs: for the ``params`` stream.

    Raises:
      ValueError: if `tiles` does not divide the outputs.

    Example:
      >>> layer = TiledDense((4, 6), tiles=3, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 4))).shape, layer.kernel.shape
      ((2, 6), (3, 4, 2))
    """

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        tiles: int,
        names: Names = (None, None),
        bias: bool = True,
        stddev: float = 0.02,
        flatten: bool = True,
        rngs: nnx.Rngs,
    ):
        self.multiply = functools.partial(multiply, flatten=flatten)
        kernel = stddev * jax.random.normal(rngs.params(), shape)
        stack = _of_columns(kernel, tiles)
        self.kernel = named_param(stack, (None, *names))
        zeros = jnp.zeros((tiles, stack.shape[2]))
        self.bias = named_param(zeros, (None, names[1])) if bias else None

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims F"]:
        """Multiply, tile by tile.

        Args:
          x: [..., in].

        Returns:
          [..., out].
        """
        bias = None if self.bias is None else self.bias[...]

        def tile(_: None, own: tuple) -> tuple[None, jax.Array]:
            kernel, bias = own
            y = self.multiply(x, kernel)
            return None, y if bias is None else y + bias

        _, tiles = jax.lax.scan(tile, None, (self.kernel[...], bias))
        return jnp.moveaxis(tiles, 0, -2).reshape(*x.shape[:-1], -1)


class TiledMLP(nnx.Module):
    """`jaxpar.models.mlp.MLP` by tiles of its hidden features.

    Each tile is multiplied into the output before the next is begun, and recomputed in
    the backward pass, so that hidden features are there for one tile at a time. The
    outputs are summed in fp32.

    Args:
      width: features in and out.
      hidden: features inside.
      tiles: into which the hidden features are cut; divides them.
      activation: one of `jaxpar.models.mlp.ACTIVATIONS`.
      bias: whether the matmuls have one.
      stddev: of the kernels before the last.
      output_stddev: of the last kernel.
      flatten: as in `jaxpar.models.layers.Linear`.
      rngs: for the ``params`` stream.

    Raises:
      ValueError: if `tiles` does not divide the hidden features.

    Example:
      >>> mlp = TiledMLP(4, 16, tiles=4, rngs=nnx.Rngs(0))
      >>> mlp(jnp.ones((2, 3, 4))).shape, mlp.up.shape, mlp.down.shape
      ((2, 3, 4), (4, 4, 4), (4, 4, 4))
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        tiles: int,
        activation: str = "gelu",
        bias: bool = True,
        stddev: float = 0.02,
        output_stddev: float = 0.02,
        flatten: bool = True,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.multiply = functools.partial(multiply, flatten=flatten)

        def first() -> nnx.Param:
            kernel = stddev * jax.random.normal(rngs.params(), (width, hidden))
            return named_param(_of_columns(kernel, tiles), (None, "embed", "mlp"))

        self.gate = first() if is_gated(activation) else None
        self.up = first()
        last = output_stddev * jax.random.normal(rngs.params(), (hidden, width))
        down = last.reshape(tiles, -1, width)
        self.down = named_param(down, (None, "mlp", "embed"))
        inside = jnp.zeros((tiles, down.shape[1]))
        self.up_bias = named_param(inside, (None, "mlp")) if bias else None
        gated = bias and self.gate is not None
        self.gate_bias = named_param(inside, (None, "mlp")) if gated else None
        self.down_bias = named_param(jnp.zeros(width), ("embed",)) if bias else None

    def __call__(self, x_BTD: Float[Array, "*dims D"]) -> Float[Array, "*dims D"]:
        """Run the MLP, tile by tile.

        Args:
          x_BTD: [..., width].

        Returns:
          [..., width].
        """
        parts = (self.gate, self.gate_bias, self.up, self.up_bias, self.down)
        stacks = [None if part is None else part[...] for part in parts]

        @jax.checkpoint
        def added(total: jax.Array, own: list) -> jax.Array:
            gate, gate_bias, up, up_bias, down = own
            gated = None if gate is None else self.multiply(x_BTD, gate)
            if gated is not None and gate_bias is not None:
                gated += gate_bias
            hidden = activate(self.activation, self.multiply(x_BTD, up), gated, up_bias)
            return total + self.multiply(hidden, down).astype(total.dtype)

        zeros = jnp.zeros(x_BTD.shape, jnp.promote_types(x_BTD.dtype, jnp.float32))
        body = lambda total, own: (added(total, own), None)  # noqa: E731
        total, _ = jax.lax.scan(body, zeros, stacks)
        y_BTD = total.astype(self.down[...].dtype)
        return y_BTD if self.down_bias is None else y_BTD + self.down_bias[...]


def _of_columns(kernel: jax.Array, tiles: int) -> jax.Array:
    """A kernel [in, out] as a stack [tiles, in, out / tiles]."""
    width, out = kernel.shape
    if tiles < 1 or out % tiles:
        raise ValueError(
            f"tiled: tiles={tiles} must be a positive divisor of the {out} features "
            "that are cut."
        )
    return jnp.moveaxis(kernel.reshape(width, tiles, out // tiles), 1, 0)
