"""The Linen examples of google/flax, each with its own model and loss."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar import Weighted
from tests.foreign.real.checkouts import Checkouts
from tests.foreign.real.programs import KEY, ROWS, Program

FLAX = "google/flax"
AXIS_RULES = (
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("embed", "fsdp"),
    ("heads", "tensor"),
)
"""As in examples/lm1b/configs/default.py."""


def imagenet(checkouts: Checkouts) -> Program:
    """ResNet-18 with BatchNorm(axis_name="batch") and a weight penalty in the loss."""
    folder = "examples/imagenet"
    models = checkouts.load(FLAX, folder, "models")
    train = checkouts.pick(
        FLAX, f"{folder}/train.py", "NUM_CLASSES", "cross_entropy_loss"
    )

    def loss(model: Any, batch: dict) -> jax.Array:
        cross_entropy = train.cross_entropy_loss(model(batch["image"]), batch["label"])
        weights = jax.tree.leaves(model.variables["params"])
        weight_l2 = sum(jnp.sum(x**2) for x in weights if x.ndim > 1)
        return cross_entropy + 0.0001 * 0.5 * weight_l2

    def make_batch(rng: np.random.Generator) -> dict:
        return {
            "image": rng.normal(size=(ROWS, 32, 32, 3)).astype(np.float32),
            "label": rng.integers(0, train.NUM_CLASSES, ROWS, dtype=np.int32),
        }

    return Program(
        models.ResNet(
            stage_sizes=[1, 1],
            block_cls=models.BottleneckResNetBlock,
            num_classes=train.NUM_CLASSES,
            num_filters=8,
        ),
        loss,
        optax.sgd(0.1 * ROWS / 256, momentum=0.9, nesterov=True),
        make_batch,
        axis_name="batch",
    )


def vae(checkouts: Checkouts) -> Program:
    """A VAE whose noise comes from a key that the caller passes."""
    folder = "examples/vae"
    models = checkouts.load(FLAX, folder, "models")
    train = checkouts.pick(
        FLAX,
        f"{folder}/train.py",
        "kl_divergence",
        "binary_cross_entropy_with_logits",
    )

    def loss(model: Any, batch: dict) -> jax.Array:
        recon, mean, logvar = model(batch["image"], jax.random.key(KEY))
        bce = train.binary_cross_entropy_with_logits(recon, batch["image"]).mean()
        return bce + train.kl_divergence(mean, logvar).mean()

    def make_batch(rng: np.random.Generator) -> dict:
        return {"image": rng.integers(0, 2, (ROWS, 784)).astype(np.float32)}

    return Program(models.model(20), loss, optax.adam(1e-3), make_batch)


def lm1b(checkouts: Checkouts) -> Program:
    """A Transformer with logical names ("embed", "kv", ...) and a masked mean."""
    folder = "examples/lm1b"
    models = checkouts.load(FLAX, folder, "models")
    train = checkouts.pick(FLAX, f"{folder}/train.py", "compute_weighted_cross_entropy")

    def sums(model: Any, batch: dict) -> tuple[jax.Array, jax.Array]:
        inputs = batch["inputs"]
        weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)
        logits = model(
            inputs,
            inputs_positions=batch["inputs_position"],
            inputs_segmentation=batch["inputs_segmentation"],
            rngs={"dropout": jax.random.key(KEY)},
        )
        return train.compute_weighted_cross_entropy(logits, inputs, weights, 0.0)

    def loss(model: Any, batch: dict) -> jax.Array:
        total, weight = sums(model, batch)
        return total / weight

    return Program(
        models.TransformerLM(
            models.TransformerConfig(
                vocab_size=64,
                output_vocab_size=64,
                emb_dim=32,
                num_heads=4,
                num_layers=2,
                qkv_dim=32,
                mlp_dim=64,
                max_len=24,
            )
        ),
        loss,
        optax.adamw(1.6e-3, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1),
        make_packed_batch,
        loss_fn=lambda model, batch: Weighted(*sums(model, batch)),
        axis_rules=AXIS_RULES,
    )


def make_packed_batch(rng: np.random.Generator) -> dict:
    """Rows of two packed texts each, padded to different lengths."""
    length = 24
    batch = {
        name: np.zeros((ROWS, length), np.int32)
        for name in ("inputs", "inputs_position", "inputs_segmentation")
    }
    for row in range(ROWS):
        first, last = rng.integers(3, 12), rng.integers(13, length)
        for segment, part in enumerate((slice(0, first), slice(first, last)), start=1):
            size = part.stop - part.start
            batch["inputs"][row, part] = rng.integers(1, 64, size)
            batch["inputs_position"][row, part] = np.arange(size)
            batch["inputs_segmentation"][row, part] = segment
    return batch


def seq2seq(checkouts: Checkouts) -> Program:
    """Two LSTMs that add numbers, the second fed with draws from what it predicts."""
    folder = "examples/seq2seq"
    models = checkouts.load(FLAX, folder, "models")
    data = checkouts.load(FLAX, folder, "input_pipeline")
    train = checkouts.pick(FLAX, f"{folder}/train.py", "cross_entropy_loss")
    table = data.CharacterTable("0123456789+= ", 3)

    def loss(model: Any, batch: dict) -> jax.Array:
        labels = batch["answer"][:, 1:]
        rngs = {"lstm": jax.random.key(KEY)}
        logits, _ = model(batch["query"], batch["answer"], rngs=rngs)
        lengths = data.get_sequence_lengths(labels, table.eos_id)
        return train.cross_entropy_loss(logits, labels, lengths)

    def make_batch(rng: np.random.Generator) -> dict:
        pairs = rng.integers(0, 100, (ROWS, 2))
        return {
            "query": table.encode_onehot([f"{a}+{b}" for a, b in pairs]),
            "answer": table.encode_onehot([f"={a + b}" for a, b in pairs]),
        }

    model = models.Seq2seq(teacher_force=False, hidden_size=32, vocab_size=15)
    return Program(model, loss, optax.adam(3e-3), make_batch)


def sst2(checkouts: Checkouts) -> Program:
    """A bidirectional LSTM with attention over texts of different lengths; sows."""
    folder = "examples/sst2"
    models = checkouts.load(FLAX, folder, "models")
    train = checkouts.pick(
        FLAX, f"{folder}/train.py", "sigmoid_cross_entropy_with_logits"
    )

    def loss(model: Any, batch: dict) -> jax.Array:
        rngs = {"dropout": jax.random.key(KEY)}
        inputs = (batch["token_ids"], batch["length"])
        logits = model(*inputs, deterministic=False, rngs=rngs)
        labels = jnp.expand_dims(batch["label"], 1)
        return jnp.mean(
            train.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
        )

    def make_batch(rng: np.random.Generator) -> dict:
        return {
            "token_ids": rng.integers(0, 64, (ROWS, 12), dtype=np.int32),
            "length": rng.integers(3, 13, ROWS, dtype=np.int32),
            "label": rng.integers(0, 2, ROWS).astype(np.float32),
        }

    return Program(
        models.TextClassifier(
            embedding_size=24,
            hidden_size=16,
            vocab_size=64,
            output_size=1,
            dropout_rate=0.5,
            word_dropout_rate=0.1,
        ),
        loss,
        optax.chain(optax.sgd(0.1, momentum=0.9), optax.add_decayed_weights(3e-6)),
        make_batch,
    )


def ppo(checkouts: Checkouts) -> Program:
    """An actor-critic whose loss normalises advantages over the batch."""
    folder = "examples/ppo"
    models = checkouts.load(FLAX, folder, "models")
    train = checkouts.pick(FLAX, f"{folder}/ppo_lib.py", "loss_fn")
    # Its own needs Atari; that it is a jit of its own hides what a Linen model changes.
    policy = checkouts.pick(FLAX, f"{folder}/agent.py", "policy_action").policy_action
    train.agent = types.SimpleNamespace(policy_action=policy.__wrapped__)

    def loss(model: Any, batch: dict) -> jax.Array:
        names = ("states", "actions", "old_log_probs", "returns", "advantages")
        minibatch = tuple(batch[name] for name in names)

        def apply_fn(_: Any, states: jax.Array) -> tuple[jax.Array, jax.Array]:
            return model(states)

        return train.loss_fn({}, apply_fn, minibatch, 0.1, 0.5, 0.01)

    def make_batch(rng: np.random.Generator) -> dict:
        return {
            "states": rng.integers(0, 256, (ROWS, 84, 84, 4)).astype(np.float32),
            "actions": rng.integers(0, 4, ROWS, dtype=np.int32),
            "old_log_probs": np.log(rng.uniform(0.2, 0.3, ROWS)).astype(np.float32),
            "returns": rng.normal(size=ROWS).astype(np.float32),
            "advantages": rng.normal(size=ROWS).astype(np.float32),
        }

    return Program(
        models.ActorCritic(num_outputs=4),
        loss,
        optax.adam(2.5e-4),
        make_batch,
        options={"coupled_batch": True},
    )
