"""What is trained: an engine, its batches, and how many FLOPs a step has."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax

import jaxpar
from benchmarks.contestants import protocol
from benchmarks.contestants.jaxpar_gpt import make_engine
from jaxpar.models import DecoderConfig, decoder_config, decoder_loss, make_decoder
from jaxpar.optim import fused_adamw
from jaxpar.tree import num_elements

CONVENTION = (
    "tokens/s x FLOPs a token / the datasheet's dense bf16 rate; full: 6 N + 12 L D T, "
    "causal: 6 N + 6 L D T; N has the embeddings; recomputation is not counted"
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training step to be measured.

    Attributes:
      engine: of it.
      batches: that it takes in turn.
      tokens: of a step.
      flops: of a step; "full" with all scores of attention, "causal" with half of them.
      attention_flops: of a step: what the kernels of attention multiply, recomputation
        included.
      vocabulary: the size of the logits.
    """

    engine: jaxpar.Engine
    batches: list[dict[str, np.ndarray]]
    tokens: int
    flops: dict[str, float]
    attention_flops: float
    vocabulary: int

    def step(self, number: int) -> Any:
        """Begin a step; its loss."""
        return self.engine.step(self.batches[number % len(self.batches)])["loss"]


def of_shape(name: str) -> Workload:
    """The GPT that all contestants train."""
    shape = protocol.SHAPES[name]
    batches = [
        {"tokens": np.array(protocol.tokens(shape, step), np.int32)}
        for step in range(8)
    ]
    causal = shape.flops_per_token - shape.causal_attention_flops
    flops = {"full": shape.flops_per_token, "causal": causal}
    return Workload(
        engine=make_engine(shape, sample_batch=batches[0]),
        batches=batches,
        tokens=shape.tokens,
        flops={name: shape.tokens * each for name, each in flops.items()},
        # Two matmuls forward, five backward; 6 L D T a token are six.
        attention_flops=shape.tokens * shape.causal_attention_flops * 7 / 6,
        vocabulary=shape.vocab,
    )


def of_model(
    model: str,
    *,
    batch: int,
    remat: str,
    bits: int | None = None,
    accumulate: int = 1,
    offload: jaxpar.Offload | None = None,
    **changes: Any,
) -> Workload:
    """A model by its name, on rows of its longest sequence.

    Args:
      model: such as "8b".
      batch: rows.
      remat: what is recomputed in the backward pass.
      bits: 8 for fused AdamW with moments in 8 bits; None for optax's AdamW.
      accumulate: micro-batches.
      offload: what is on the host.
      changes: fields of the config, over those of the name.
    """
    config = decoder_config(model, remat=remat, **changes)
    shape = batch, config.seq_len + 1
    drawn = np.random.default_rng(0).integers(
        0, config.vocab_size, (4, *shape), dtype=np.int32
    )
    optimizer = optax.adamw(1e-4) if bits is None else fused_adamw(1e-4, bits=bits)
    needs_half = offload is not None and offload.delayed
    is_half = needs_half or jax.default_backend() == "gpu"
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optimizer,
        sample_batch={"tokens": drawn[0]},
        precision="bf16" if is_half else "fp32",
        accumulate=accumulate,
        offload=offload,
    )
    tokens = batch * config.seq_len
    scores = causal_scores_flops(config)
    dense = 6 * num_elements(engine.state.params)
    matmuls = 9 if remat == "full" else 7
    return Workload(
        engine=engine,
        batches=[{"tokens": rows} for rows in drawn],
        tokens=tokens,
        flops={
            "full": tokens * (dense + 2 * scores),
            "causal": tokens * (dense + scores),
        },
        attention_flops=tokens * scores * matmuls / 6,
        vocabulary=config.vocab_size,
    )


def causal_scores_flops(config: DecoderConfig) -> int:
    """FLOPs of attention's six matmuls a token, of half of the scores."""
    width = config.num_heads * config.head_size
    return 6 * config.num_layers * width * config.seq_len
