"""Causal self-attention: grouped queries, rotary positions, cuDNN where available.

The models call `Attention`; `attention_implementation` is the only place that chooses
the program.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxpar.mesh import DATA, TENSOR
from jaxpar.models.attention_placeholder import attention_placeholder
from jaxpar.models.causal_attention import causal_attention
from jaxpar.models.layers import Linear, multiply
from jaxpar.models.sparse_attention import sparse_attention
from jaxpar.sharding.constrain import constrain, rows_are_automatic
from jaxpar.sparse_attention import SparsityPattern

Implementation = Literal["xla", "cudnn", "blocked", "planned"]
Rotation = tuple[Float[Array, "#B T half"], Float[Array, "#B T half"]]


def attention_implementation(
    choice: str, *, dtype: jnp.dtype, head_size: int, masked: bool
) -> Implementation:
    """Choose the program that computes attention.

    "auto" means blocks of queries (`jaxpar.models.causal_attention`) on a CPU; cuDNN's
    fused kernel where this process has an NVIDIA GPU of at least compute capability 8.0
    and the kernel supports the dtype and the head size; otherwise XLA. With a mask
    other than the causal one, a GPU means XLA: cuDNN needs such a mask as a bias, [T,
    S] per row of the batch. Without a GPU, a placeholder call replaces cuDNN's kernel,
    which only a GPU can compile (`jaxpar.models.attention_placeholder`).

    Args:
      choice: "auto", or the result itself.
      dtype: of queries, keys and values.
      head_size: features per head.
      masked: whether there is a mask besides the causal one.

    Returns:
      "blocked", "planned", or "xla" or "cudnn" as in `jax.nn.dot_product_attention`.

    Example:
      >>> attention_implementation(
      ...     "auto", dtype=jnp.dtype("float32"), head_size=64, masked=False
      ... )
      'blocked'
    """
    if choice in ("cudnn", "xla", "blocked"):
        return choice
    if _device_kind() == "cpu":
        return "blocked"
    if masked or dtype not in (jnp.bfloat16, jnp.float16):
        return "xla"
    capability = _compute_capability()
    largest = 256 if capability >= 9.0 else 128
    fits = head_size % 8 == 0 and head_size <= largest
    if fits and _is_placeholder():
        return "planned"
    return "cudnn" if capability >= 8.0 and fits else "xla"


def _device_kind() -> str:
    """The kind of device that the traced program will run on."""
    mesh_device = jax.sharding.get_abstract_mesh().abstract_device
    return (mesh_device or jax.devices()[0]).device_kind


def _is_placeholder() -> bool:
    """Whether the traced program is for NVIDIA GPUs, and none is present."""
    here = jax.devices()[0].device_kind
    return "NVIDIA" in _device_kind() and "NVIDIA" not in here


def _compute_capability() -> float:
    """Compute capability of the present GPU; 0 if there is none or it is not used."""
    # A program compiled for absent GPUs can't contain cuDNN's kernel, so the present
    # device decides, not the mesh's.
    device = jax.devices()[0]
    if _device_kind() == "cpu" or "NVIDIA" not in device.device_kind:
        return 0.0
    return float(device.compute_capability)


def rotation_at(
    positions_BT: Int[Array, "B T"], head_size: int, base: float = 10_000.0
) -> Rotation:
    """Compute the angles by which rotary embedding rotates each pair of features.

    Pair i of a head at position t rotates by ``t * base ** (-2 i / head_size)``.

    Args:
      positions_BT: position of each token; one row applies to a whole batch.
      head_size: features per head; even.
      base: of the geometric series of wavelengths.

    Returns:
      Cosines and sines, fp32, [B, T, head_size / 2] each.

    Source: Su et al., "RoFormer" (2021), equation 15.
    """
    frequency = base ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    angle = positions_BT[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTNH: Float[Array, "B T N H"], rotation: Rotation) -> jax.Array:
    """Rotate each pair of features by its angle, in fp32.

    Args:
      x_BTNH: queries or keys.
      rotation: the result of `rotation_at`.

    Returns:
      The same shape and dtype.

    Differs: feature i pairs with i + H/2, not with its neighbour, as in most
    published checkpoints; the two differ by a permutation of features.
    """
    cosine, sine = (part[:, :, None, :] for part in rotation)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
    return turned.astype(x_BTNH.dtype)


def attend(
    query_BTNH: Float[Array, "B T N H"],
    key_BSKH: Float[Array, "B T K H"],
    value_BSKH: Float[Array, "B T K H"],
    mask_BNTS: Bool[Array, "B 1 T T"] | None,
    *,
    implementation: Implementation,
) -> Float[Array, "B T N H"]:
    """Attend causally, with softmax in fp32, and save only the arguments.

    XLA's program would save the scores for the backward pass, three arrays of [N, T, S]
    per row of the batch and layer; they are recomputed instead, as in cuDNN's kernel.

    Args:
      query_BTNH: queries.
      key_BSKH: keys; each head of them serves N / K query heads.
      value_BSKH: values.
      mask_BNTS: which keys a query may see, besides the causal mask.
      implementation: the result of `attention_implementation`.

    Returns:
      The weighted sums of values.
    """
    if implementation == "blocked":
        return causal_attention(query_BTNH, key_BSKH, value_BSKH, mask_BNTS)
    if implementation == "planned":
        return attention_placeholder(query_BTNH, key_BSKH, value_BSKH)
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=implementation
    )
    if implementation == "cudnn":
        return attention(query_BTNH, key_BSKH, value_BSKH, mask=mask_BNTS)

    @jax.checkpoint
    def attend_xla(
        query_BTNH: jax.Array, key_BSKH: jax.Array, value_BSKH: jax.Array
    ) -> jax.Array:
        parts = query_BTNH, key_BSKH, value_BSKH
        if query_BTNH.dtype == jnp.float16 and not _compute_capability():
            # jax asks for fp16 matmuls with fp32 sums, which only GPUs have.
            parts = tuple(part.astype(jnp.float32) for part in parts)
        return attention(*parts, mask=mask_BNTS).astype(query_BTNH.dtype)

    return attend_xla(query_BTNH, key_BSKH, value_BSKH)


class Attention(nnx.Module):
    """Causal attention with `num_heads` query heads over `num_kv_heads` key heads.

    Args:
      width: model width; num_heads divides it.
      num_heads: query heads.
      num_kv_heads: key and value heads; divides num_heads.
      bias: whether the projections of queries, values and output have one.
      output_stddev: of the output projection, which is added to the residual stream.
      flatten: as in `Linear`.
      implementation: "auto", "xla", "cudnn" or "blocked"; or a pattern of
        `jaxpar.sparse_attention`, to attend only to its blocks.
      pattern_len: tokens for which the pattern's block layout is made; a shorter
        sequence uses its first blocks. None for each sequence's own length.
      rngs: for the ``params`` stream.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool,
        output_stddev: float,
        flatten: bool = True,
        implementation: str | SparsityPattern = "auto",
        pattern_len: int | None = None,
        rngs: nnx.Rngs,
    ):
        self.head_size = width // num_heads
        self.implementation = implementation
        self.pattern_len = pattern_len
        kv_width = num_kv_heads * self.head_size

        def projection(out: int, name: str, bias: bool) -> Linear:
            names = ("embed", name)
            return Linear((width, out), names, bias=bias, flatten=flatten, rngs=rngs)

        self.query = projection(width, "heads", bias)
        # Without rotary positions a key bias adds the same number to all scores of a
        # query, which softmax ignores: its gradient is rounding noise, and Adam makes
        # full steps of noise.
        self.key = projection(kv_width, "kv_heads", bias=False)
        self.value = projection(kv_width, "kv_heads", bias)
        self.output = Linear(
            (width, width),
            ("heads", "embed"),
            bias=bias,
            stddev=output_stddev,
            flatten=flatten,
            rngs=rngs,
        )

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        *,
        rotation: Rotation | None = None,
        segment_ids_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Attend.

        Args:
          x_BTD: normalised residual stream.
          rotation: rotary angles; None for none.
          segment_ids_BT: tokens attend only to tokens of their own segment; None
            where each row is one segment.

        Returns:
          The update of the residual stream.
        """
        query_BTNH, key_BSKH, value_BSKH = map(self._heads, self._project(x_BTD))
        if rotation is not None:
            query_BTNH = rotate(query_BTNH, rotation)
            key_BSKH = rotate(key_BSKH, rotation)
        attended_BTNH = self._attend(
            checkpoint_name(query_BTNH, "qkv"),
            checkpoint_name(key_BSKH, "qkv"),
            checkpoint_name(value_BSKH, "qkv"),
            segment_ids_BT,
        )
        attended_BTD = attended_BTNH.reshape(*x_BTD.shape[:2], -1)
        attended_BTD = checkpoint_name(attended_BTD, "attention")
        # The constraint is for the cotangent: under sequence parallelism the compiler
        # would leave it sharded over tokens, and compute all heads on every device.
        return self.output(constrain(attended_BTD, DATA, None, TENSOR))

    def _project(self, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
        """Queries, keys and values, [B, T, heads x H]: by one matmul, if that is local.

        The columns of the one kernel are in groups: a key head, its value head and the
        query heads that share them. So each device's columns are of its own heads. Not
        where the compiler places the rows: it would all-reduce the one's gradient.
        """
        parts = self.query, self.key, self.value
        size = self.head_size
        groups = self.key.kernel.shape[1] // size
        tensor = jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)
        if groups % tensor or rows_are_automatic():
            return tuple(part(x_BTD) for part in parts)
        width = x_BTD.shape[-1]
        kernels = [p.kernel[...].reshape(width, groups, -1, size) for p in parts]
        kernel = constrain(jnp.concatenate(kernels, axis=2), None, TENSOR)
        product = multiply(x_BTD, kernel.reshape(width, -1), flatten=self.query.flatten)
        product = product.reshape(*x_BTD.shape[:2], groups, -1, size)
        if self.query.bias is not None:
            shapes = [kernel.shape[1:] for kernel in kernels]
            own = [
                jnp.zeros(shape, product.dtype)
                if part.bias is None
                else part.bias[...].reshape(shape)
                for part, shape in zip(parts, shapes, strict=True)
            ]
            product = product + jnp.concatenate(own, axis=1)
        product = constrain(product, DATA, None, TENSOR)
        # Slices, not a split: the gradient of those is fused with the sum for the bias.
        ends = np.cumsum([kernel.shape[2] for kernel in kernels]).tolist()
        found = [product[..., a:b, :] for a, b in zip([0, *ends], ends, strict=False)]
        return tuple(part.reshape(*x_BTD.shape[:2], -1) for part in found)

    def _attend(
        self,
        query_BTNH: jax.Array,
        key_BSKH: jax.Array,
        value_BSKH: jax.Array,
        segment_ids_BT: jax.Array | None,
    ) -> jax.Array:
        if not isinstance(self.implementation, str):
            return sparse_attention(
                query_BTNH,
                key_BSKH,
                value_BSKH,
                self.implementation,
                pattern_len=self.pattern_len,
                segment_ids_BT=segment_ids_BT,
            )
        mask_BNTS = None
        if segment_ids_BT is not None:
            mask_BNTS = (
                segment_ids_BT[:, None, :, None] == segment_ids_BT[:, None, None]
            )
        chosen = attention_implementation(
            self.implementation,
            dtype=query_BTNH.dtype,
            head_size=self.head_size,
            masked=mask_BNTS is not None,
        )
        return attend(
            query_BTNH, key_BSKH, value_BSKH, mask_BNTS, implementation=chosen
        )

    def _heads(self, x: jax.Array) -> jax.Array:
        x_BTNH = x.reshape(*x.shape[:2], -1, self.head_size)
        return constrain(x_BTNH, DATA, None, TENSOR, None)
