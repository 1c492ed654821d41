"""Causal self-attention: grouped queries, windows and caps, cuDNN where available.

The models call `Attention`; `attention_implementation` is the only place that chooses
the program.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxpar.mesh import DATA, TENSOR
from jaxpar.models.attention_placeholder import attention_placeholder
from jaxpar.models.causal_attention import PLAIN, Scoring, causal_attention
from jaxpar.models.layers import Linear, multiply
from jaxpar.models.rotary import Rotation, rotate
from jaxpar.models.sparse_attention import sparse_attention
from jaxpar.sharding.constrain import constrain, rows_are_automatic
from jaxpar.sparse_attention import SparsityPattern

Implementation = Literal["xla", "cudnn", "blocked", "planned"]


def attention_implementation(
    choice: str,
    *,
    dtype: jnp.dtype,
    head_size: int,
    masked: bool,
    scoring: Scoring = PLAIN,
) -> Implementation:
    """Choose the program that computes attention.

    "auto" means blocks of queries (`jaxpar.models.causal_attention`) on a CPU; cuDNN's
    fused kernel where this process has an NVIDIA GPU of at least compute capability 8.0
    and the kernel supports the dtype and the head size; otherwise XLA. With a mask
    other than the causal one, a GPU means XLA: cuDNN needs such a mask as a bias, [T,
    S] per row of the batch. A cap of the scores always means blocks of queries. Without
    a GPU, a placeholder call replaces cuDNN's kernel, which only a GPU can compile
    (`jaxpar.models.attention_placeholder`).

    Args:
      choice: "auto", or the result itself.
      dtype: of queries, keys and values.
      head_size: features per head.
      masked: whether there is a mask besides the causal one.
      scoring: how queries score keys.

    Returns:
      "blocked", "planned", or "xla" or "cudnn" as in `jax.nn.dot_product_attention`.

    Example:
      >>> attention_implementation(
      ...     "auto", dtype=jnp.dtype("float32"), head_size=64, masked=False
      ... )
      'blocked'
    """
    if scoring.softcap is not None:
        return "blocked"
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


def attend(
    query_BTNH: Float[Array, "B T N H"],
    key_BSKH: Float[Array, "B T K H"],
    value_BSKH: Float[Array, "B T K H"],
    mask_BNTS: Bool[Array, "B 1 T T"] | None,
    *,
    implementation: Implementation,
    scoring: Scoring = PLAIN,
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
      scoring: how queries score keys; a cap needs "blocked".

    Returns:
      The weighted sums of values.
    """
    parts = query_BTNH, key_BSKH, value_BSKH
    if implementation == "blocked":
        return causal_attention(*parts, mask_BNTS, scoring)
    if implementation == "planned":
        return attention_placeholder(*parts, window=scoring.window)
    if implementation == "cudnn":
        return _attend_dense(*parts, mask_BNTS, scoring, "cudnn")

    @jax.checkpoint
    def attend_xla(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if query.dtype == jnp.float16 and not _compute_capability():
            # jax asks for fp16 matmuls with fp32 sums, which only GPUs have.
            query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        out = _attend_dense(query, key, value, mask_BNTS, scoring, "xla")
        return out.astype(query_BTNH.dtype)

    return attend_xla(*parts)


def _attend_dense(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    mask_BNTS: jax.Array | None,
    scoring: Scoring,
    implementation: Literal["xla", "cudnn"],
) -> jax.Array:
    """`jax.nn.dot_product_attention`, causal."""
    window = scoring.window
    return jax.nn.dot_product_attention(
        query_BTNH,
        key_BSKH,
        value_BSKH,
        mask=mask_BNTS,
        scale=scoring.scaled(query_BTNH.shape[-1]),
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads of an attention.

    Attributes:
      num: query heads.
      num_kv: key and value heads; divides `num`.
      size: features of each.
    """

    num: int
    num_kv: int
    size: int


class Attention(nnx.Module):
    """Causal attention with grouped queries.

    Args:
      width: model width.
      heads: query heads, key heads, and their size.
      biases: of which projections: of "query", "key", "value" and "output".
      output_stddev: of the output projection, which is added to the residual stream.
      flatten: as in `Linear`.
      implementation: "auto", "xla", "cudnn" or "blocked"; or a pattern of
        `jaxpar.sparse_attention`, to attend only to its blocks.
      pattern_len: tokens for which the pattern's block layout is made; a shorter
        sequence uses its first blocks. None for each sequence's own length.
      scoring: how queries score keys.
      make_norm: makes the norm of each query head and each key head, from its size;
        None for no norms.
      rngs: for the ``params`` stream.
    """

    def __init__(
        self,
        width: int,
        heads: Heads,
        *,
        biases: Collection[str],
        output_stddev: float,
        flatten: bool = True,
        implementation: str | SparsityPattern = "auto",
        pattern_len: int | None = None,
        scoring: Scoring = PLAIN,
        make_norm: Callable[[int], nnx.Module] | None = None,
        rngs: nnx.Rngs,
    ):
        self.head_size = heads.size
        self.implementation = implementation
        self.pattern_len = pattern_len
        self.scoring = scoring

        def projection(name: str, num: int, dims: str) -> Linear:
            shape, bias = (width, num * heads.size), name in biases
            return Linear(shape, ("embed", dims), bias=bias, flatten=flatten, rngs=rngs)

        self.query = projection("query", heads.num, "heads")
        self.key = projection("key", heads.num_kv, "kv_heads")
        self.value = projection("value", heads.num_kv, "kv_heads")
        self.output = Linear(
            (heads.num * heads.size, width),
            ("heads", "embed"),
            bias="output" in biases,
            stddev=output_stddev,
            flatten=flatten,
            rngs=rngs,
        )
        self.query_norm = make_norm(heads.size) if make_norm else None
        self.key_norm = make_norm(heads.size) if make_norm else None

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
        if self.query_norm is not None and self.key_norm is not None:
            query_BTNH = self.query_norm(query_BTNH)
            key_BSKH = self.key_norm(key_BSKH)
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
        if any(part.bias is not None for part in parts):
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
            scoring=self.scoring,
        )
        parts = query_BTNH, key_BSKH, value_BSKH, mask_BNTS
        return attend(*parts, implementation=chosen, scoring=self.scoring)

    def _heads(self, x: jax.Array) -> jax.Array:
        x_BTNH = x.reshape(*x.shape[:2], -1, self.head_size)
        return constrain(x_BTNH, DATA, None, TENSOR, None)
