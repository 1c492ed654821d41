"""What is a decoder: an embedding, blocks and a head, of every published family."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxpar.model.blocks import PipelineModel
from jaxpar.models.attention import Attention, Heads
from jaxpar.models.block import TransformerBlock
from jaxpar.models.blocked_attention import Scoring
from jaxpar.models.decoder.config import DecoderConfig, block_kind
from jaxpar.models.decoder.embed_head import Embed, Head, make_norm
from jaxpar.models.experts.layer import Experts
from jaxpar.models.experts.stream import Hidden, run_block, stream_of
from jaxpar.models.lora import add_adapters
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


def make_decoder(
    config: DecoderConfig, *, make_attention: Callable[..., Attention] = Attention
) -> PipelineModel:
    """Make a decoder-only transformer with normalisation before each half of a block.

    ``model(tokens_BT)`` returns fp32 logits [B, T, V]. It takes by keyword
    positions_BT, the position of each token (None for 0, 1, 2 and so on), and
    segment_ids_BT: tokens attend only to tokens of their own segment.

    Parameters are fp32 and carry logical names (vocab, embed, heads, kv_heads, mlp,
    layers); the model computes in the dtype that they are cast to. Its only other state
    is dropout's keys and counts; with ``dropout=0`` it has none.

    Args:
      config: the shape of the model.
      make_attention: of each block; called as `Attention` is.

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
        sections=_sections(config, make_attention),
        head=functools.partial(Head, config),
        tied=(tie,) if config.tied_embedding else (),
        remat=config.remat,
        remat_names=config.remat_names,
        unroll=config.unroll,
        former_names=_FORMER_NAMES,
    )


def _sections(
    config: DecoderConfig, make_attention: Callable[..., Attention]
) -> dict[str, Any]:
    """Blocks; in groups, where they are of several kinds in turn."""
    block = functools.partial(Block, config, make_attention=make_attention)
    size = config.group_size
    if size == 1:
        return {"blocks": (functools.partial(block, place=1), config.num_layers)}
    groups, left = divmod(config.num_layers, size)
    found: dict[str, Any] = {}
    if groups:
        found["blocks"] = (functools.partial(BlockGroup, block, size), groups)
    # Those that are left are of one kind, or each a section of its own.
    places = range(1, left + 1)
    kinds = {block_kind(config, place) for place in places}
    if len(kinds) == 1:
        found["last_blocks"] = (functools.partial(block, place=1), left)
    elif left:
        found |= {
            f"last_blocks_{place}": (functools.partial(block, place=place), 1)
            for place in places
        }
    return found


class BlockGroup(nnx.Module):
    """Blocks of several kinds, one behind the other.

    Args:
      make_block: makes one, from its place and ``rngs``.
      size: blocks of the group.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(
        self, make_block: Callable[..., "Block"], size: int, *, rngs: nnx.Rngs
    ):
        places = range(1, size + 1)
        self.layers = nnx.List(make_block(place=p, rngs=rngs) for p in places)

    def __call__(
        self,
        hidden: Hidden,
        *,
        positions_BT: Int[Array, "#B T"] | None = None,
        segment_ids_BT: Int[Array, "B T"] | None = None,
    ) -> Hidden:
        """Run the blocks; see `Block`."""
        for layer in self.layers:
            hidden = layer(
                hidden, positions_BT=positions_BT, segment_ids_BT=segment_ids_BT
            )
        return hidden


class Block(TransformerBlock):
    """Attention, then an MLP, each added to the residual stream.

    Args:
      config: the shape of the model.
      place: of the block, from 1: it says which kind the block is of.
      make_attention: called as `Attention` is.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        place: int = 1,
        make_attention: Callable[..., Attention] = Attention,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.is_local, has_experts = block_kind(config, place)
        window = config.window if self.is_local else None
        scale, cap = config.attention_scale, config.attention_softcap
        attention = make_attention(
            config.width,
            Heads(
                config.num_heads,
                config.kv_heads,
                config.head_size,
                norm_all=config.qk_norm == "width",
            ),
            biases=_biases(config),
            output_stddev=_output_stddev(config),
            flatten=not config.sequence_parallel,
            implementation=config.attention,
            pattern_len=config.seq_len,
            scoring=Scoring(scale, window, cap),
            make_norm=_norm_of_heads(config),
            rngs=rngs,
        )
        make_mlp = functools.partial(MLP, config.width, config.hidden_width)
        if has_experts:
            sizes = config.width, config.hidden_width, config.experts
            make_mlp = functools.partial(Experts, *sizes)
        mlp = make_mlp(
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
        add_adapters(self, config.lora, rngs)

    def __call__(
        self,
        hidden: Hidden,
        *,
        positions_BT: Int[Array, "#B T"] | None = None,
        segment_ids_BT: Int[Array, "B T"] | None = None,
    ) -> Hidden:
        """Run the block.

        Args:
          hidden: residual stream, [B, T, D]; of a model with experts, a `Hidden`.
          positions_BT: position of each token; None for 0, 1, 2 and so on.
          segment_ids_BT: tokens attend only to tokens of their own segment; None
            where each row is one segment. Segment 0 is padding.

        Returns:
          As `hidden`.
        """
        rotation = self._rotation(stream_of(hidden).shape[1], positions_BT)
        is_token_BT = None if segment_ids_BT is None else segment_ids_BT != 0
        how = {"rotation": rotation, "segment_ids_BT": segment_ids_BT}
        return run_block(self, hidden, is_token_BT=is_token_BT, **how)

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
    if config.qk_norm is None:
        return None
    plus_one = config.norm == "rmsnorm_plus_one"
    how = {"epsilon": config.norm_epsilon, "plus_one": plus_one, "name": None}
    return functools.partial(RMSNorm, **how)


def _output_stddev(config: DecoderConfig) -> float:
    """2 L matmuls add to the residual stream; their sum should not grow with L."""
    return 0.02 * (2 * config.num_layers) ** -0.5
