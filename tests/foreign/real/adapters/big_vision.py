"""google-research/big_vision: ViT (scanned, with remat) and Mixer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from tests.foreign.real.checkouts import Checkouts
from tests.foreign.real.programs import KEY, ROWS, Program

BIG_VISION = "google-research/big_vision"


def _classifier(checkouts: Checkouts, file: str, **config: Any) -> Program:
    models = checkouts.pick(BIG_VISION, f"big_vision/models/{file}.py")
    utils = checkouts.pick(BIG_VISION, "big_vision/utils.py", "softmax_xent", "onehot")

    def loss(model: Any, batch: dict) -> jax.Array:
        rngs = {"dropout": jax.random.key(KEY)}
        logits, _ = model(batch["image"], train=True, rngs=rngs)
        return utils.softmax_xent(logits=logits, labels=batch["labels"])

    def make_batch(rng: np.random.Generator) -> dict:
        labels = jnp.asarray(rng.integers(0, 16, ROWS))
        return {
            "image": rng.normal(size=(ROWS, 32, 32, 3)).astype(np.float32),
            "labels": np.asarray(utils.onehot(labels, 16)),
        }

    return Program(
        models.Model(num_classes=16, **config),
        loss,
        optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=1e-4)
        ),
        make_batch,
    )


def vit(checkouts: Checkouts) -> Program:
    """Have its layers scanned and rematerialised, and pooled by attention."""
    return _classifier(
        checkouts,
        "vit",
        variant="mu/8",
        depth=2,
        scan=True,
        pool_type="map",
        dropout=0.1,
    )


def mixer(checkouts: Checkouts) -> Program:
    """Have one of its two MLPs split over tensor."""
    program = _classifier(
        checkouts,
        "mlp_mixer",
        patch_size=(8, 8),
        num_blocks=2,
        hidden_dim=32,
        tokens_mlp_dim=16,
        channels_mlp_dim=64,
        stoch_depth=0.1,
    )
    rules = {
        "*/channel_mixing/Dense_0/kernel": P(None, "tensor"),
        "*/channel_mixing/Dense_1/kernel": P("tensor", None),
    }
    return dataclasses.replace(program, options={"rules": rules})
