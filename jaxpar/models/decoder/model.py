"""What is the model that the recipes train: a GPT, as embedding, blocks and head."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxpar.mesh import DATA, TENSOR
from jaxpar.model.blocks import PipelineModel
from jaxpar.models.attention import Attention, rotation_at
from jaxpar.models.decoder.config import DecoderConfig
from jaxpar.models.decoder.embed_head import (
    Embed,
    Head,
    constrain_residual,
    gather_tokens,
    make_dropout,
    make_norm,
)
from jaxpar.models.layers import Linear
from jaxpar.sharding.constrain import constrain

_FORMER_NAMES = (
    # Before they were the same on every mesh: on one stage, ...
    ("embed/embedding/*", "embedding/*"),
    ("embed/positions/*", "positions/*"),
    ("head/final_norm/*", "final_norm/*"),
    ("head/logits/*", "head/*"),
    # ... and on several.
    ("blocks/*", "blocks/block/*"),
    ("head/logits/*", "head/kernel/*"),
)


def make_decoder(config: DecoderConfig) -> PipelineModel:
    """Make a decoder-only transformer with normalisation before each half of a block.

    ``model(tokens_BT)`` returns fp32 logits [B, T, V]. It takes by keyword
    positions_BT, the position of each token (None for 0, 1, 2 and so on), and
    segment_ids_BT: tokens attend only to tokens of their own segment.

    Parameters are fp32 and carry logical names (vocab, embed, heads, kv_heads, mlp,
    layers); the model computes in the dtype that they are cast to. Its only other state
    is dropout's keys and counts; with ``dropout=0`` it has none.

    Args:
      config: the shape of the model.

    Returns:
      The model, for ``jaxpar.initialize(model=...)`` on any mesh; `PipelineModel.init`
      makes one to call.

    Example:
      >>> config = DecoderConfig(num_layers=2, num_heads=2, width=16, seq_len=8)
      >>> tokens_BT = jnp.zeros((1, 8), int)
      >>> make_decoder(config).init(0, tokens_BT)(tokens_BT).shape
      (1, 8, 256)

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners"
    (2019).
    """
    tie = (("embed", "embedding/table"), ("head", "logits/table"))
    return PipelineModel(
        embed=functools.partial(Embed, config),
        sections=[(functools.partial(Block, config), config.num_layers)],
        head=functools.partial(Head, config),
        tied=(tie,) if config.tied_embedding else (),
        remat=config.remat,
        remat_names=config.remat_names,
        unroll=config.unroll,
        former_names=_FORMER_NAMES,
    )


class Block(nnx.Module):
    """Attention, then an MLP, each added to the residual stream.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = make_norm(config)
        self.attention = Attention(
            config.width,
            config.num_heads,
            config.kv_heads,
            bias=config.bias,
            output_stddev=_output_stddev(config),
            flatten=not config.sequence_parallel,
            implementation=config.attention,
            pattern_len=config.seq_len,
            rngs=rngs,
        )
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = make_dropout(config, rngs)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        *,
        positions_BT: Int[Array, "#B T"] | None = None,
        segment_ids_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Run the block.

        Args:
          x_BTD: residual stream.
          positions_BT: position of each token; None for 0, 1, 2 and so on.
          segment_ids_BT: tokens attend only to tokens of their own segment; None
            where each row is one segment.

        Returns:
          Residual stream.
        """
        rotation = None
        if self.config.positions == "rotary":
            if positions_BT is None:
                positions_BT = jnp.arange(x_BTD.shape[1])[None]
            own = self.config.head_size, self.config.rotary_base
            rotation = rotation_at(positions_BT, *own)
        y_BTD = gather_tokens(self.attention_norm(x_BTD), self.config)
        y_BTD = self.attention(y_BTD, rotation=rotation, segment_ids_BT=segment_ids_BT)
        x_BTD = self._add(x_BTD, y_BTD)
        y_BTD = gather_tokens(self.mlp_norm(x_BTD), self.config)
        return self._add(x_BTD, self.mlp(y_BTD))

    def _add(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        y_BTD = constrain_residual(y_BTD, self.config)
        if self.dropout is not None:
            y_BTD = self.dropout(y_BTD)
        return constrain_residual(x_BTD + y_BTD, self.config)


class MLP(nnx.Module):
    """Two matmuls around a gelu, or three around a gated silu.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` stream.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), for "swiglu".
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        dense = functools.partial(
            Linear, bias=config.bias, flatten=not config.sequence_parallel, rngs=rngs
        )
        width, hidden = config.width, config.hidden_width
        is_gated = config.activation == "swiglu"
        self.gate = dense((width, hidden), ("embed", "mlp")) if is_gated else None
        self.up = dense((width, hidden), ("embed", "mlp"))
        stddev = _output_stddev(config)
        self.down = dense((hidden, width), ("mlp", "embed"), stddev=stddev)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Run the MLP.

        Args:
          x_BTD: normalised residual stream.

        Returns:
          The update of the residual stream.
        """
        up_BTF = self._labelled(self.up.multiply(x_BTD))
        bias_F = None if self.up.bias is None else self.up.bias[...]
        if self.gate is None:
            return self.down(_gelu(up_BTF, bias_F))
        gate_BTF = self._labelled(self.gate(x_BTD))
        up_BTF = up_BTF if bias_F is None else up_BTF + bias_F
        return self.down(_gated_silu(gate_BTF, up_BTF))

    @staticmethod
    def _labelled(hidden_BTF: jax.Array) -> jax.Array:
        return constrain(checkpoint_name(hidden_BTF, "mlp_hidden"), DATA, None, TENSOR)


# Recomputed in the backward pass from the matmul's result: as written, gelu would save
# four arrays of [B, T, F]. The bias is added here, or the sum would be another array.
def _biased_gelu(up_BTF: jax.Array, bias_F: jax.Array | None) -> jax.Array:
    return jax.nn.gelu(up_BTF if bias_F is None else up_BTF + bias_F)


_gelu = jax.custom_vjp(_biased_gelu)


def _gelu_forward(
    up_BTF: jax.Array, bias_F: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    return _biased_gelu(up_BTF, bias_F), (up_BTF, bias_F)


def _gelu_backward(
    saved: tuple[jax.Array, jax.Array | None], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    up_BTF, bias_F = saved
    # So that XLA does not keep what the forward pass has computed.
    up_BTF = jax.lax.optimization_barrier(up_BTF)
    return jax.vjp(_biased_gelu, up_BTF, bias_F)[1](cotangent)


_gelu.defvjp(_gelu_forward, _gelu_backward)


@jax.checkpoint
def _gated_silu(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    return jax.nn.silu(gate_BTF) * up_BTF


def _output_stddev(config: DecoderConfig) -> float:
    """2 L matmuls add to the residual stream; their sum should not grow with L."""
    return 0.02 * (2 * config.num_layers) ** -0.5
