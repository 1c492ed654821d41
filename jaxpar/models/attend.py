"""Which program computes attention: blocks of queries, XLA's, or cuDNN's kernel.

`attention_implementation` is the only place that chooses.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxpar.jaxprs.device import device_kind
from jaxpar.models.attention_placeholder import attention_placeholder
from jaxpar.models.blocked_attention import PLAIN, Scoring, blocked_attention

Implementation = Literal["xla", "cudnn", "blocked", "planned"]


def attention_implementation(
    choice: str,
    *,
    dtype: jnp.dtype,
    head_size: int,
    masked: bool,
    biased: bool = False,
    scoring: Scoring = PLAIN,
) -> Implementation:
    """Choose the program that computes attention.

    "auto" means blocks of queries (`jaxpar.models.blocked_attention`) on a CPU; cuDNN's
    fused kernel where this process has an NVIDIA GPU of at least compute capability 8.0
    and the kernel supports the dtype and the head size; otherwise XLA. With a mask
    other than the causal one, a GPU means XLA: cuDNN needs such a mask as a bias, [T,
    S] per row of the batch; a bias of the scores means XLA there too. A cap of the
    scores always means blocks of queries. Without a GPU, a placeholder call
    replaces cuDNN's kernel, which only a GPU can compile
    (`jaxpar.models.attention_placeholder`).

    Args:
      choice: "auto", or the result itself.
      dtype: of queries, keys and values.
      head_size: features per head.
      masked: whether there is a mask besides the causal one.
      biased: whether something is added to the scores.
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
    if device_kind() == "cpu":
        return "blocked"
    if masked or biased or dtype not in (jnp.bfloat16, jnp.float16):
        return "xla"
    capability = _compute_capability()
    largest = 256 if capability >= 9.0 else 128
    fits = head_size % 8 == 0 and head_size <= largest
    if fits and _is_placeholder():
        return "planned"
    return "cudnn" if capability >= 8.0 and fits else "xla"


def _is_placeholder() -> bool:
    """Whether the traced program is for NVIDIA GPUs, and none is present."""
    here = jax.devices()[0].device_kind
    return "NVIDIA" in device_kind() and "NVIDIA" not in here


def _compute_capability() -> float:
    """Compute capability of the present GPU; 0 if there is none or it is not used."""
    # A program compiled for absent GPUs can't contain cuDNN's kernel, so the present
    # device decides, not the mesh's.
    device = jax.devices()[0]
    if device_kind() == "cpu" or "NVIDIA" not in device.device_kind:
        return 0.0
    return float(device.compute_capability)


def attend(
    query_BTNH: Float[Array, "B T N H"],
    key_BSKH: Float[Array, "B S K H"],
    value_BSKH: Float[Array, "B S K H"],
    mask_BNTS: Bool[Array, "B 1 T S"] | None,
    *,
    implementation: Implementation,
    scoring: Scoring = PLAIN,
    bias_NTS: Float[Array, "N T S"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attend, with softmax in fp32, and save only the arguments.

    XLA's program would save the scores for the backward pass, three arrays of [N, T, S]
    per row of the batch and layer; they are recomputed instead, as in cuDNN's kernel.

    Args:
      query_BTNH: queries.
      key_BSKH: keys; each head of them serves N / K query heads.
      value_BSKH: values.
      mask_BNTS: which keys a query may see, besides the causal mask.
      implementation: the result of `attention_implementation`.
      scoring: how queries score keys; a cap needs "blocked".
      bias_NTS: what is added to the scores of every row of the batch; not with
        "planned".

    Returns:
      The weighted sums of values.
    """
    parts = query_BTNH, key_BSKH, value_BSKH
    if implementation == "blocked":
        return blocked_attention(*parts, mask_BNTS, scoring, bias_NTS)
    if implementation == "planned":
        return attention_placeholder(*parts, scoring)
    if implementation == "cudnn":
        return _attend_dense(*parts, mask_BNTS, bias_NTS, scoring, "cudnn")

    @jax.checkpoint
    def attend_xla(
        query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None
    ) -> jax.Array:
        if query.dtype == jnp.float16 and not _compute_capability():
            # jax asks for fp16 matmuls with fp32 sums, which only GPUs have.
            query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        out = _attend_dense(query, key, value, mask_BNTS, bias, scoring, "xla")
        return out.astype(query_BTNH.dtype)

    return attend_xla(*parts, bias_NTS)


def _attend_dense(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    mask_BNTS: jax.Array | None,
    bias_NTS: jax.Array | None,
    scoring: Scoring,
    implementation: Literal["xla", "cudnn"],
) -> jax.Array:
    """`jax.nn.dot_product_attention`."""
    window = scoring.window
    return jax.nn.dot_product_attention(
        query_BTNH,
        key_BSKH,
        value_BSKH,
        mask=mask_BNTS,
        bias=None if bias_NTS is None else bias_NTS[None].astype(query_BTNH.dtype),
        scale=scoring.scaled(query_BTNH.shape[-1]),
        is_causal=scoring.causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
