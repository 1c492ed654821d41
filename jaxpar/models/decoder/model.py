"""What is a decoder: an embedding, blocks and a head, of every published family."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxpar.mesh import DATA, TENSOR
from jaxpar.model.blocks import PipelineModel
from jaxpar.models.attention import Attention, Heads
from jaxpar.models.causal_attention import Scoring
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
from jaxpar.models.norms import RMSNorm
from jaxpar.models.rotary import Rotation, rotation_at
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
        sections=_sections(config),
        head=functools.partial(Head, config),
        tied=(tie,) if config.tied_embedding else (),
        remat=config.remat,
        remat_names=config.remat_names,
        unroll=config.unroll,
        former_names=_FORMER_NAMES,
    )


def _sections(config: DecoderConfig) -> dict[str, Any]:
    """Blocks; in groups, where the last of so many sees everything."""
    every, block = config.global_every, functools.partial(Block, config)
    if every is None:
        return {"blocks": (block, config.num_layers)}
    groups, left = divmod(config.num_layers, every)
    found: dict[str, Any] = {"blocks": (functools.partial(BlockGroup, config), groups)}
    return {**found, "last_blocks": (block, left)} if left else found


class BlockGroup(nnx.Module):
    """Blocks with a window, and behind them one that sees everything.

    Args:
      config: the shape of the model; `global_every` blocks are a group.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        places = range(1, (config.global_every or 1) + 1)
        self.layers = nnx.List(
            Block(config, sees_all=place == len(places), rngs=rngs) for place in places
        )

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        *,
        positions_BT: Int[Array, "#B T"] | None = None,
        segment_ids_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Run the blocks; see `Block`."""
        for layer in self.layers:
            x_BTD = layer(
                x_BTD, positions_BT=positions_BT, segment_ids_BT=segment_ids_BT
            )
        return x_BTD


class Block(nnx.Module):
    """Attention, then an MLP, each added to the residual stream.

    Args:
      config: the shape of the model.
      sees_all: whether it attends to all tokens before, though others have a window.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(
        self, config: DecoderConfig, *, sees_all: bool = False, rngs: nnx.Rngs
    ):
        self.config = config
        self.is_local = config.window is not None and not sees_all
        window = config.window if self.is_local else None
        scale, cap = config.attention_scale, config.attention_softcap
        self.attention_norm = make_norm(config)
        self.attention = Attention(
            config.width,
            Heads(config.num_heads, config.kv_heads, config.head_size),
            biases=_biases(config),
            output_stddev=_output_stddev(config),
            flatten=not config.sequence_parallel,
            implementation=config.attention,
            pattern_len=config.seq_len,
            scoring=Scoring(scale, window, cap),
            make_norm=_norm_of_heads(config),
            rngs=rngs,
        )
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config, rngs=rngs)
        self.attention_post_norm = make_norm(config) if config.post_norm else None
        self.mlp_post_norm = make_norm(config) if config.post_norm else None
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
        rotation = self._rotation(x_BTD.shape[1], positions_BT)
        y_BTD = gather_tokens(self.attention_norm(x_BTD), self.config)
        y_BTD = self.attention(y_BTD, rotation=rotation, segment_ids_BT=segment_ids_BT)
        x_BTD = self._add(x_BTD, y_BTD, self.attention_post_norm)
        y_BTD = gather_tokens(self.mlp_norm(x_BTD), self.config)
        return self._add(x_BTD, self.mlp(y_BTD), self.mlp_post_norm)

    def _rotation(self, length: int, positions_BT: jax.Array | None) -> Rotation | None:
        config = self.config
        if config.positions != "rotary":
            return None
        if positions_BT is None:
            positions_BT = jnp.arange(length)[None]
        base, scaling = config.rotary_base, config.rotary_scaling
        if self.is_local and config.local_rotary_base is not None:
            base, scaling = config.local_rotary_base, None
        return rotation_at(positions_BT, config.head_size, base, scaling)

    def _add(
        self, x_BTD: jax.Array, y_BTD: jax.Array, norm: nnx.Module | None
    ) -> jax.Array:
        y_BTD = constrain_residual(y_BTD, self.config)
        if norm is not None:
            y_BTD = norm(y_BTD)
        if self.dropout is not None:
            y_BTD = self.dropout(y_BTD)
        return constrain_residual(x_BTD + y_BTD, self.config)


class MLP(nnx.Module):
    """Two matmuls around a gelu, or three around a gated silu or gelu.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` stream.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), for the gates.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.activation = config.activation
        dense = functools.partial(
            Linear, bias=config.bias, flatten=not config.sequence_parallel, rngs=rngs
        )
        width, hidden = config.width, config.hidden_width
        is_gated = config.activation != "gelu"
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
        gated = _gated_silu if self.activation == "swiglu" else _gated_gelu
        return self.down(gated(gate_BTF, up_BTF))

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


@jax.checkpoint
def _gated_gelu(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate_BTF) * up_BTF


def _biases(config: DecoderConfig) -> list[str]:
    """The projections of attention that have a bias."""
    has = {
        "query": config.has_qkv_bias,
        "key": config.key_bias,
        "value": config.has_qkv_bias,
        "output": config.bias,
    }
    return [name for name, flag in has.items() if flag]


def _norm_of_heads(config: DecoderConfig) -> Callable[[int], RMSNorm] | None:
    """Makes the norm of a query head or key head; None if there are none."""
    if not config.qk_norm:
        return None
    plus_one = config.norm == "rmsnorm_plus_one"
    how = {"epsilon": config.norm_epsilon, "plus_one": plus_one, "name": None}
    return functools.partial(RMSNorm, **how)


def _output_stddev(config: DecoderConfig) -> float:
    """2 L matmuls add to the residual stream; their sum should not grow with L."""
    return 0.02 * (2 * config.num_layers) ** -0.5
