"""The NNX examples of google/flax: rngs at the call, and names of mesh axes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpar import Weighted
from tests.foreign.real.adapters.flax_linen import FLAX, make_packed_batch
from tests.foreign.real.checkouts import Checkouts
from tests.foreign.real.programs import KEY, ROWS, Program


def mnist(checkouts: Checkouts) -> Program:
    """A CNN with BatchNorm, whose dropout takes its rngs at the call."""
    train = checkouts.pick(FLAX, "examples/mnist/train.py", "CNN", "loss_fn")

    def loss(model: Any, batch: dict) -> jax.Array:
        return train.loss_fn(model, batch, nnx.Rngs(KEY))[0]

    def make_batch(rng: np.random.Generator) -> dict:
        return {
            "image": rng.uniform(size=(ROWS, 28, 28, 1)).astype(np.float32),
            "label": rng.integers(0, 10, ROWS, dtype=np.int32),
        }

    return Program(train.CNN, loss, optax.sgd(0.005, momentum=0.9), make_batch)


def gemma(checkouts: Checkouts) -> Program:
    """A Gemma 3 whose parameters name mesh axes (fsdp, tp); a masked mean."""
    folder = "examples/gemma"
    config = checkouts.load(FLAX, folder, "transformer_cfg")
    transformer = checkouts.load(FLAX, folder, "transformer")
    train = checkouts.pick(FLAX, f"{folder}/train.py", "compute_weighted_cross_entropy")
    cfg = small_gemma(config)

    def per_sample(model: Any, batch: dict) -> tuple[jax.Array, jax.Array]:
        inputs, segments = batch["inputs"], batch["inputs_segmentation"]
        mask = inputs > 0
        same_text = segments[:, :, None] == segments[:, None, :]
        logits, _ = model(
            inputs,
            positions=batch["inputs_position"],
            attention_mask=same_text & transformer.make_causal_attn_mask(mask),
            cache=None,
            rngs=None,
        )
        weights = mask.astype(jnp.float32)
        losses = train.compute_weighted_cross_entropy(logits, batch["targets"], weights)
        return losses, weights.sum()

    def weighted(model: Any, batch: dict) -> Weighted:
        losses, weight = per_sample(model, batch)
        return Weighted(losses.mean() * weight, weight)

    def make_batch(rng: np.random.Generator) -> dict:
        batch = make_packed_batch(rng)
        return {**batch, "targets": np.roll(batch["inputs"], -1, axis=1)}

    return Program(
        lambda rngs: transformer.Transformer(cfg, rngs=rngs),
        lambda model, batch: per_sample(model, batch)[0].mean(),
        optax.adamw(1.6e-3, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1),
        make_batch,
        loss_fn=weighted,
    )


def small_gemma(config: Any) -> Any:
    """Have every kind of layer that Gemma 1 to 3 have, once."""
    kinds = (config.AttentionType.LOCAL_SLIDING, config.AttentionType.GLOBAL)
    return config.TransformerConfig(
        num_layers=2,
        num_embed=64,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=kinds,
        sliding_window_size=8,
        attn_logits_soft_cap=50.0,
        shd_config=weights_only(config.ShardingConfig.fsdp_tp_sharding()),
    )


def weights_only(shardings: Any) -> Any:
    """Leave out how activations are sharded: that needs a mesh of explicit axes."""
    names = [field.name for field in dataclasses.fields(shardings)]
    return dataclasses.replace(
        shardings, **{name: None for name in names if name.startswith("act_")}
    )
