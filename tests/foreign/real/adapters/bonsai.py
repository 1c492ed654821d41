"""jax-ml/bonsai: Qwen3, ViT, UNet and Mamba2, on NNX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.foreign.real.adapters.flax_nnx import weights_only
from tests.foreign.real.checkouts import Checkouts
from tests.foreign.real.programs import KEY, ROWS, Program

BONSAI = "jax-ml/bonsai"


def qwen3(checkouts: Checkouts) -> Program:
    """A Qwen3 whose parameters name mesh axes (fsdp, tp) and that makes its cache."""
    modeling = checkouts.load(BONSAI, "bonsai/models/qwen3", "modeling")
    shardings = modeling.ShardConfig.default(use_fsdp=True, use_tp=True)
    config = modeling.ModelConfig(
        num_layers=2,
        vocab_size=64,
        emb_dim=32,
        mlp_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        rope_scaling_factor=8,
        local_rope_theta=1e4,
        norm_eps=1e-6,
        tie_word_embeddings=True,
        shd_cfg=weights_only(shardings),
    )

    def loss(model: Any, batch: dict) -> jax.Array:
        tokens = batch["tokens"]
        cache = modeling.init_cache(config, *tokens.shape, 0, jnp.float32)
        logits = model(tokens, cache=cache, segment_ids=jnp.ones_like(tokens))
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        ).mean()

    return Program(
        lambda rngs: modeling.Qwen3(config, rngs=rngs),
        loss,
        optax.adamw(1e-3),
        lambda rng: {"tokens": rng.integers(0, 64, (ROWS, 16), dtype=np.int32)},
    )


def vit(checkouts: Checkouts) -> Program:
    """A ViT that takes rngs at the call; its MLPs are split over tensor."""
    modeling = checkouts.load(BONSAI, "bonsai/models/vit", "modeling")
    config = modeling.ModelConfig(
        image_size=(32, 32),
        patch_size=(8, 8),
        num_channels=3,
        hidden_dim=32,
        attn_dropout_prob=0.1,
        dropout_prob=0.1,
        num_heads=4,
        mlp_dim=64,
        eps=1e-12,
        num_layers=2,
        num_labels=16,
    )

    def factory(rngs: nnx.Rngs) -> nnx.Module:
        model = modeling.ViTClassificationModel(config, rngs=rngs)
        model.train()
        return model

    def loss(model: Any, batch: dict) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(
            model(batch["image"], rngs=nnx.Rngs(KEY)), batch["label"]
        ).mean()

    def make_batch(rng: np.random.Generator) -> dict:
        return {
            "image": rng.normal(size=(ROWS, 32, 32, 3)).astype(np.float32),
            "label": rng.integers(0, 16, ROWS, dtype=np.int32),
        }

    return Program(
        factory,
        loss,
        optax.adamw(1e-3),
        make_batch,
        options={
            "rules": {
                "layers/*/linear1/kernel": P(None, "tensor"),
                "layers/*/linear2/kernel": P("tensor", None),
            }
        },
    )


def unet(checkouts: Checkouts) -> Program:
    """A UNet; its layers hold functions made by partial."""
    modeling = checkouts.load(BONSAI, "bonsai/models/unet", "modeling")
    config = modeling.ModelConfig(in_channels=3, features=(4, 8, 16, 32, 64))

    def loss(model: Any, batch: dict) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(
            model(batch["image"]), batch["mask"]
        ).mean()

    def make_batch(rng: np.random.Generator) -> dict:
        return {
            "image": rng.normal(size=(ROWS, 32, 32, 3)).astype(np.float32),
            "mask": rng.integers(0, 2, (ROWS, 32, 32), dtype=np.int32),
        }

    return Program(
        lambda rngs: modeling.UNet(config, rngs=rngs),
        loss,
        optax.adam(1e-3),
        make_batch,
    )


def mamba2(checkouts: Checkouts) -> Program:
    """A Mamba2 with a loss of its own."""
    modeling = checkouts.load(BONSAI, "bonsai/models/mamba2", "modeling")
    config = modeling.ModelConfig(
        vocab_size=64,
        hidden_size=32,
        state_size=8,
        head_dim=8,
        chunk_size=8,
        num_hidden_layers=2,
    )
    return Program(
        lambda rngs: modeling.Mamba2ForCausalLM(config, rngs=rngs),
        lambda model, batch: model(batch["tokens"], labels=batch["tokens"])["loss"],
        optax.adamw(1e-3),
        lambda rng: {"tokens": rng.integers(0, 64, (ROWS, 20), dtype=np.int32)},
    )
