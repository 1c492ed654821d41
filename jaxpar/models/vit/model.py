"""What is a ViT: patches as tokens, blocks that all see each other, a classifier."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpar.model.blocks import PipelineModel
from jaxpar.models.attention import Attention, Heads
from jaxpar.models.block import TransformerBlock, gather_tokens
from jaxpar.models.blocked_attention import Scoring
from jaxpar.models.experts.layer import Experts
from jaxpar.models.experts.stream import (
    Hidden,
    RouterLosses,
    router_losses,
    run_block,
    stream_of,
)
from jaxpar.models.layers import Linear
from jaxpar.models.mlp import MLP
from jaxpar.models.norms import LayerNorm
from jaxpar.models.vit.config import VitConfig
from jaxpar.models.vit.embed import VitEmbed


def make_vit(config: VitConfig) -> PipelineModel:
    """Make a classifier of images with normalisation before each half of a block.

    ``model(image_BHWC)`` returns fp32 logits [B, num_labels]; of a model with experts
    (logits, `jaxpar.models.experts.stream.RouterLosses`). Images are floats around 0,
    channels last.

    Parameters are fp32 and carry logical names (embed, heads, kv_heads, mlp, expert,
    layers);
    the model computes in the dtype that they are cast to. Its only other state is
    dropout's keys and counts; with ``dropout=0`` it has none.

    Args:
      config: the shape of the model.

    Returns:
      The model, for ``jaxpar.initialize(model=...)`` on any mesh; `PipelineModel.init`
      makes one to call.

    Example:
      >>> config = VitConfig(image_size=8, patch_size=4, num_layers=1, num_labels=10)
      >>> image_BHWC = jnp.zeros((1, 8, 8, 3))
      >>> make_vit(config).init(0, image_BHWC)(image_BHWC).shape
      (1, 10)

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021).
    """
    return PipelineModel(
        embed=functools.partial(VitEmbed, config),
        sections=_sections(config),
        head=functools.partial(VitHead, config),
        remat=config.remat,
        remat_names=config.remat_names,
        unroll=config.unroll,
    )


def _sections(config: VitConfig) -> dict[str, Any]:
    """Blocks; in groups, where the last of several has experts."""
    has_experts = bool(config.experts.num)
    block = functools.partial(VitBlock, config, has_experts=has_experts)
    if config.group_size > 1:
        block = functools.partial(VitBlockGroup, config)
    return {"blocks": (block, config.num_layers // config.group_size)}


class VitBlockGroup(nnx.Module):
    """Blocks one behind the other, of which the last has experts.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        size = config.group_size
        self.layers = nnx.List(
            VitBlock(config, has_experts=place == size, rngs=rngs)
            for place in range(1, size + 1)
        )

    def __call__(self, hidden: Hidden) -> Hidden:
        """Run the blocks."""
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class VitBlock(TransformerBlock):
    """Attention to all tokens, then an MLP, each added to the residual stream.

    Args:
      config: the shape of the model.
      has_experts: whether they stand in the place of the MLP.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: VitConfig, *, has_experts: bool = False, rngs: nnx.Rngs):
        biases = {"query": config.qkv_bias, "value": config.qkv_bias}
        biases |= {"key": config.key_bias, "output": True}
        attention = Attention(
            config.width,
            Heads(config.num_heads, config.num_heads, config.head_size),
            biases=[name for name, has in biases.items() if has],
            output_stddev=_output_stddev(config),
            flatten=not config.sequence_parallel,
            implementation=config.attention,
            scoring=Scoring(causal=False),
            rngs=rngs,
        )
        super().__init__(
            attention,
            _make_mlp(config, has_experts, rngs),
            make_norm=functools.partial(_make_norm, config),
            dropout=config.dropout,
            sequence_parallel=config.sequence_parallel,
            rngs=rngs,
        )

    def __call__(self, hidden: Hidden) -> Hidden:
        """Run the block.

        Args:
          hidden: residual stream, [B, T, D]; of a model with experts, a `Hidden`.

        Returns:
          As `hidden`.
        """
        return run_block(self, hidden)


class VitHead(nnx.Module):
    """Normalise, take the class token or the mean of the patches, and classify.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` stream.
    """

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.final_norm = _make_norm(config)
        # The labels are not sharded: a tensor axis seldom divides their number.
        shape = config.width, config.num_labels
        self.classifier = Linear(shape, ("embed", None), rngs=rngs)

    def __call__(
        self, hidden: Hidden
    ) -> Float[Array, "B V"] | tuple[Float[Array, "B V"], RouterLosses]:
        """Classify.

        Args:
          hidden: the residual stream after the last block, as a block returns it.

        Returns:
          Logits, fp32; of a model with experts (logits, the routers' losses).
        """
        config, x_BTD = self.config, stream_of(hidden)
        if config.pooling == "class_token":
            pooled_BD = self.final_norm(x_BTD[:, 0])
        else:
            normal_BTD = self.final_norm(x_BTD)
            normal_BTD = gather_tokens(normal_BTD, config.sequence_parallel)
            pooled_BD = normal_BTD.mean(1)
        kernel_DV, bias_V = self.classifier.kernel[...], self.classifier.bias
        assert bias_V is not None, "a classifier has one"
        # Rounded to bf16, logits around 20 would be 0.06 apart.
        logits_BV = jnp.matmul(pooled_BD, kernel_DV, preferred_element_type=jnp.float32)
        logits_BV = logits_BV + bias_V[...].astype(jnp.float32)
        router = router_losses(hidden, config.experts, config.num_expert_layers)
        return logits_BV if router is None else (logits_BV, router)


def _make_mlp(config: VitConfig, has_experts: bool, rngs: nnx.Rngs) -> MLP | Experts:
    """What a block has behind its attention."""
    make = functools.partial(MLP, config.width, config.hidden_width)
    if has_experts:
        sizes = config.width, config.hidden_width, config.experts
        make = functools.partial(Experts, *sizes)
    return make(
        activation=config.activation,
        bias=True,
        output_stddev=_output_stddev(config),
        flatten=not config.sequence_parallel,
        rngs=rngs,
    )


def _make_norm(config: VitConfig) -> LayerNorm:
    return LayerNorm(config.width, epsilon=config.norm_epsilon)


def _output_stddev(config: VitConfig) -> float:
    """2 L matmuls add to the residual stream; their sum should not grow with L."""
    return 0.02 * (2 * config.num_layers) ** -0.5
