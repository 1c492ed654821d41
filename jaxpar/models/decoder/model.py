"""What is a decoder: an embedding, blocks and a head, of every published family."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.model.blocks import PipelineModel
from jaxpar.models.attention import Attention, Heads
from jaxpar.models.block import TransformerBlock
from jaxpar.models.blocked_attention import Scoring
from jaxpar.models.decoder.config import DecoderConfig
from jaxpar.models.decoder.embed_head import Embed, Head, make_norm
from jaxpar.models.mlp import MLP
from jaxpar.models.norms import RMSNorm
from jaxpar.models.rotary import Rotation, rotation_at

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


class Block(TransformerBlock):
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
        attention = Attention(
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
        mlp = MLP(
            config.width,
            config.hidden_width,
            activation=config.activation,
            bias=config.bias,
            output_stddev=_output_stddev(config),
            flatten=not config.sequence_parallel,
            rngs=rngs,
        )
        super().__init__(
            attention,
            mlp,
            make_norm=functools.partial(make_norm, config),
            norms="both" if config.post_norm else "before",
            dropout=config.dropout,
            sequence_parallel=config.sequence_parallel,
            rngs=rngs,
        )

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
        return self.run(x_BTD, rotation=rotation, segment_ids_BT=segment_ids_BT)

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
