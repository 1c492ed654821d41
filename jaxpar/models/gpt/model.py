"""What is the model that the recipes train? A GPT whose layers are stacked.

Blocks are built once per layer and stacked: every parameter of a block is
[L, ...], and `jax.lax.scan` runs them, so that compile time does not grow with depth.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxpar.mesh import DATA, TENSOR
from jaxpar.model.remat import remat
from jaxpar.models.attention import Attention, Rotation, rotation_at
from jaxpar.models.gpt.config import GPTConfig
from jaxpar.models.gpt.embed_head import (
    constrain_residual,
    embed,
    gather_tokens,
    logits_of,
    make_dropout,
    make_embeddings,
    make_norm,
)
from jaxpar.models.layers import Linear
from jaxpar.sharding.constrain import constrain
from jaxpar.step.weighted import Weighted
from jaxpar.types import Batch


class GPT(nnx.Module):
    """A decoder-only transformer with normalisation before each half of a block.

    Parameters are fp32 and carry logical names (vocab, embed, heads, kv_heads, mlp,
    layers); the model computes in the dtype that they are cast to. Its only other state
    is dropout's keys and counts; with ``dropout=0`` it has none.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` and ``dropout`` streams.

    Example:
      >>> config = GPTConfig(num_layers=2, num_heads=2, width=16, seq_len=8)
      >>> model = GPT(config, rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((1, 8), int)).shape
      (1, 8, 256)

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners"
    (2019).
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        vocab_size, width = config.vocab_size, config.width
        self.embedding, self.positions = make_embeddings(config, rngs)
        self.dropout = make_dropout(config, rngs)
        self.blocks = _make_blocks(config, rngs)
        self.final_norm = make_norm(config)
        self.head = (
            None
            if config.tied_embedding
            else Linear((width, vocab_size), ("embed", "vocab"), bias=False, rngs=rngs)
        )

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        *,
        positions_BT: Int[Array, "#B T"] | None = None,
        segment_ids_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Predict each next token.

        Args:
          tokens_BT: token numbers, from 0 to vocab_size - 1.
          positions_BT: position of each token; None for 0, 1, 2 and so on.
          segment_ids_BT: tokens attend only to tokens of their own segment; None
            where each row is one segment.

        Returns:
          Logits, fp32.

        Raises:
          ValueError: if T exceeds the number of learned positions.
        """
        hidden_BTD = self.hidden(
            tokens_BT, positions_BT=positions_BT, segment_ids_BT=segment_ids_BT
        )
        return self.logits(hidden_BTD)

    def hidden(
        self,
        tokens_BT: Int[Array, "B T"],
        *,
        positions_BT: Int[Array, "#B T"] | None = None,
        segment_ids_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Compute the head's input: everything but the logits.

        Args:
          tokens_BT: as in a call.
          positions_BT: as in a call.
          segment_ids_BT: as in a call.

        Returns:
          The normalised residual stream after the last block.

        Raises:
          ValueError: if T exceeds the number of learned positions.
        """
        config = self.config
        x_BTD = embed(self, tokens_BT, positions_BT)
        if positions_BT is None:
            positions_BT = jnp.arange(tokens_BT.shape[1])[None]
        rotation = rotation_of(config, positions_BT)
        x_BTD = self._run_blocks(x_BTD, rotation, segment_ids_BT)
        return gather_tokens(self.final_norm(x_BTD), config)

    def logits(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Apply the head, or the transposed embedding table if they are tied.

        Args:
          hidden_BTD: the result of `hidden`.

        Returns:
          Logits, fp32.
        """
        head = self.head
        kernel_DV = self.embedding.table[...].T if head is None else head.kernel[...]
        return logits_of(hidden_BTD, kernel_DV, self.config)

    def _run_blocks(
        self,
        x_BTD: jax.Array,
        rotation: Rotation | None,
        segment_ids_BT: jax.Array | None,
    ) -> jax.Array:
        config = self.config
        is_loop = config.scan_layers and config.unroll < config.num_layers

        def run(graphdef: nnx.GraphDef, x_BTD: jax.Array, state: nnx.State):
            block = nnx.merge(graphdef, state)
            x_BTD = block(x_BTD, rotation=rotation, segment_ids_BT=segment_ids_BT)
            return x_BTD, nnx.state(block, nnx.RngCount)

        def step(graphdef: nnx.GraphDef):
            return remat(
                functools.partial(run, graphdef),
                config.remat,
                names=config.remat_names,
                prevent_cse=not is_loop,
            )

        if isinstance(self.blocks, nnx.List):
            for block in self.blocks:
                graphdef, state = nnx.split(block)
                x_BTD, counts = step(graphdef)(x_BTD, state)
                self._count_draws(block, counts)
            return x_BTD
        graphdef, state = nnx.split(self.blocks)
        x_BTD, counts = jax.lax.scan(step(graphdef), x_BTD, state, unroll=config.unroll)
        self._count_draws(self.blocks, counts)
        return x_BTD

    def _count_draws(self, blocks: nnx.Module, counts: nnx.State) -> None:
        # A model without random draws may be called under a transformation that it was
        # not made in, where Flax forbids updates.
        if self.dropout is not None and not self.dropout.deterministic:
            nnx.update(blocks, counts)


def rotation_of(config: GPTConfig, positions_BT: Int[Array, "#B T"]) -> Rotation | None:
    """Compute the angles by which every block's attention rotates queries and keys.

    Args:
      config: the shape of the model.
      positions_BT: position of each token.

    Returns:
      Rotary angles, or None for learned positions.
    """
    if config.positions == "rotary":
        return rotation_at(positions_BT, config.head_size)
    return None


class Block(nnx.Module):
    """Attention, then an MLP, each added to the residual stream.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
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
        rotation: Rotation | None = None,
        segment_ids_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Run the block.

        Args:
          x_BTD: residual stream.
          rotation: rotary angles; None for none.
          segment_ids_BT: tokens attend only to tokens of their own segment; None
            where each row is one segment.

        Returns:
          Residual stream.
        """
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

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
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
        up_BTF = checkpoint_name(self.up(x_BTD), "mlp_hidden")
        if self.gate is None:
            hidden_BTF = _gelu(constrain(up_BTF, DATA, None, TENSOR))
        else:
            gate_BTF = checkpoint_name(self.gate(x_BTD), "mlp_hidden")
            gate_BTF = constrain(gate_BTF, DATA, None, TENSOR)
            hidden_BTF = _gated_silu(gate_BTF, constrain(up_BTF, DATA, None, TENSOR))
        return self.down(hidden_BTF)


def gpt_loss(model: Callable[..., jax.Array], batch: Batch) -> Weighted:
    """Sum the next-token cross entropy, in nats.

    The label's logit is selected by comparison and sum: elementwise work that fuses
    with the pass over the logits, also on a sharded vocabulary. The gradient of a
    gather would be a scatter into an array of the logits' size.

    Args:
      model: maps tokens [B, T] to logits [B, T, V].
      batch: "tokens", [B, T + 1] integers, and optionally "weights", [B, T]: the weight
        of predicting tokens[:, t + 1].

    Returns:
      The weighted sum over targets and the sum of weights, fp32.

    Raises:
      ValueError: if "tokens" is missing, or "weights" does not have one entry per
        target.

    Example:
      >>> config = GPTConfig(num_layers=1, num_heads=1, width=8, seq_len=4)
      >>> model = GPT(config, rngs=nnx.Rngs(0))
      >>> loss = gpt_loss(model, {"tokens": jnp.zeros((2, 5), int)})
      >>> float(loss.weight)
      8.0
    """
    if "tokens" not in batch:
        raise ValueError(
            f"batch: has {sorted(batch)}, but gpt_loss reads 'tokens' [B, T + 1] and, "
            "if given, 'weights' [B, T]."
        )
    inputs_BT, targets_BT = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    weights_BT = batch.get("weights")
    if weights_BT is None:
        weights_BT = jnp.ones(targets_BT.shape, jnp.float32)
    if weights_BT.shape != targets_BT.shape:
        raise ValueError(
            f"batch: 'weights' has shape {weights_BT.shape}, but 'tokens' "
            f"{batch['tokens'].shape} gives targets of shape {targets_BT.shape}; give "
            "one weight per target."
        )
    logits_BTV = model(inputs_BT).astype(jnp.float32)
    numbers_V = jnp.arange(logits_BTV.shape[-1])
    is_target_BTV = numbers_V == targets_BT[..., None]
    target_logits_BT = jnp.where(is_target_BTV, logits_BTV, 0).sum(-1)
    losses_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_logits_BT
    weights_BT = weights_BT.astype(jnp.float32)
    return Weighted((losses_BT * weights_BT).sum(), weights_BT.sum())


# Recomputed in the backward pass from the matmuls' results: as written, gelu would
# save four arrays of [B, T, F].
@jax.checkpoint
def _gelu(up_BTF: jax.Array) -> jax.Array:
    return jax.nn.gelu(up_BTF)


@jax.checkpoint
def _gated_silu(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    return jax.nn.silu(gate_BTF) * up_BTF


def _make_blocks(config: GPTConfig, rngs: nnx.Rngs) -> Block | nnx.List:
    if not config.scan_layers:
        return nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make_stacked(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs=rngs)

    return make_stacked(rngs)


def _output_stddev(config: GPTConfig) -> float:
    """2 L matmuls add to the residual stream; their sum should not grow with L."""
    return 0.02 * (2 * config.num_layers) ** -0.5
