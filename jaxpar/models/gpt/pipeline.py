"""How is the GPT split for a pipeline: into its embedding, blocks and head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.model.blocks import PipelineModel
from jaxpar.models.gpt.config import GPTConfig
from jaxpar.models.gpt.embed_head import (
    embed,
    gather_tokens,
    logits_of,
    make_dropout,
    make_embeddings,
    make_norm,
)
from jaxpar.models.gpt.model import GPT, Block, rotation_of
from jaxpar.models.layers import Embedding, Linear
from jaxpar.types import Params


def pipeline_gpt(config: GPTConfig) -> PipelineModel:
    """Split `jaxpar.models.GPT` into embedding, blocks and head for a pipeline.

    Calls, parameters and results are the GPT's; parameters are under "embed", "blocks"
    and "head". `scan_layers` and `unroll` have no effect: blocks are stacked.

    Args:
      config: the shape of the model.

    Returns:
      The model, for ``jaxpar.initialize(model=...)``.

    Example:
      >>> pipeline_gpt(GPTConfig(num_layers=2, num_heads=2, width=16)).num_blocks
      2
    """
    tie = (("embed", "embedding/table"), ("head", "kernel/table"))
    return PipelineModel(
        embed=lambda rngs: _Embed(config, rngs=rngs),
        block=lambda rngs: _Block(config, rngs=rngs),
        num_blocks=config.num_layers,
        head=lambda rngs: _Head(config, rngs=rngs),
        tied=(tie,) if config.tied_embedding else (),
        remat=config.remat,
        remat_names=config.remat_names,
    )


def as_gpt(config: GPTConfig, params: Params) -> GPT:
    """Put the parameters of a pipelined GPT into the plain model, such as to sample.

    Args:
      config: the model's shape, with stacked layers.
      params: as in ``engine.state.params``.

    Returns:
      The model, with the same arrays.
    """
    embed, head = params["embed"], params["head"]
    own = {
        "embedding": embed["embedding"],
        "blocks": params["blocks"]["block"],
        "final_norm": head["final_norm"],
    }
    if "positions" in embed:
        own["positions"] = embed["positions"]
    if not config.tied_embedding:
        own["head"] = head["kernel"]
    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
        graphdef, like, rest = nnx.split(model, nnx.Param, ...)
        rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
        nnx.replace_by_pure_dict(like, own)
        return nnx.merge(graphdef, like, rest)


class _Embed(nnx.Module):
    """Tokens, positions, dropout."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding, self.positions = make_embeddings(config, rngs)
        self.dropout = make_dropout(config, rngs)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        *,
        positions_BT: Int[Array, "#B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        return embed(self, tokens_BT, positions_BT)


class _Block(nnx.Module):
    """A block that computes its rotation itself."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.block = Block(config, rngs=rngs)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        *,
        positions_BT: Int[Array, "#B T"] | None = None,
        segment_ids_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        if positions_BT is None:
            positions_BT = jnp.arange(x_BTD.shape[1])[None]
        rotation = rotation_of(self.config, positions_BT)
        return self.block(x_BTD, rotation=rotation, segment_ids_BT=segment_ids_BT)


class _Head(nnx.Module):
    """The last norm and the logits."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.final_norm = make_norm(config)
        width, vocab = config.width, config.vocab_size
        self.kernel = (
            Embedding((vocab, width), ("vocab", "embed"), rngs=rngs)
            if config.tied_embedding
            else Linear((width, vocab), ("embed", "vocab"), bias=False, rngs=rngs)
        )

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        hidden_BTD = gather_tokens(self.final_norm(x_BTD), self.config)
        kernel = self.kernel
        is_tied = isinstance(kernel, Embedding)
        kernel_DV = kernel.table[...].T if is_tied else kernel.kernel[...]
        return logits_of(hidden_BTD, kernel_DV, self.config)
