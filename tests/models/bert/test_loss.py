"""Is each loss of a BERT the mean that NumPy takes, and is what lacks named?"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

from jaxpar.models import BertConfig, make_bert, make_bert_loss, pretraining_batch
from jaxpar.models.bert.loss import masked_word_accuracy, word_weights
from jaxpar.step.inputs import Replicated
from jaxpar.step.weighted import mean

RNG = np.random.default_rng(0)
SHAPE = (3, 6)
CONFIG = {"vocab_size": 13, "seq_len": 6, "num_layers": 1, "num_heads": 2, "width": 8}
LABELS = np.where(RNG.random(SHAPE) < 0.5, RNG.integers(0, 13, SHAPE), -100)
BATCH: dict[str, Any] = {
    "tokens": RNG.integers(0, 13, SHAPE),
    "labels": LABELS,
    "weights": RNG.random(SHAPE).astype(np.float32),
    "next_sentence": np.array([1, -1, 0]),
    "label": np.array([-1, 2, 0]),
    "attention_mask": np.array([[1] * 6, [1] * 4 + [0] * 2, [1] * 5 + [0]]),
}


def config_of(task: str) -> BertConfig:
    return BertConfig(**CONFIG, task=task, num_labels=13 if task == "tokens" else 3)


@functools.cache
def model_of(task: str) -> Any:
    model = make_bert(config_of(task)).init(0, BATCH["tokens"])
    rng = np.random.default_rng(1)
    leaves, tree = jax.tree.flatten(model.params)
    drawn = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in leaves]
    return model.with_params(jax.tree.unflatten(tree, drawn))


def given(**change: Any) -> dict[str, Any]:
    batch = {**BATCH, **change}
    return {k: v for k, v in batch.items() if v is not None}


def on_device(batch: dict[str, Any]) -> dict[str, Any]:
    """As the engine gives it to a loss."""
    return {
        k: jnp.asarray(v.value if isinstance(v, Replicated) else v)
        for k, v in batch.items()
    }


def losses(logits: Any, labels: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    own = np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - own


def run(task: str) -> tuple[float, dict[str, float], Any]:
    """Loss and metrics by our function; and the logits."""
    model, loss_fn = model_of(task), make_bert_loss(config_of(task))

    @jax.jit
    def run_both(batch: dict[str, Any]) -> tuple[Any, Any]:
        segments = {"segment_ids_BT": batch["attention_mask"]}
        return loss_fn(model, batch), model(batch["tokens"], **segments)

    found, logits = run_both(on_device(pretraining_batch(given())))
    loss, metrics = found if isinstance(found, tuple) else (found, {})
    return float(mean(loss)), {k: float(mean(v)) for k, v in metrics.items()}, logits


WEIGHTS = (LABELS >= 0) * BATCH["weights"] * BATCH["attention_mask"]


def test_pretraining_is_the_sum_of_two_means():
    loss, metrics, (words, sentences) = run("pretraining")
    word = (losses(words, LABELS) * WEIGHTS).sum() / WEIGHTS.sum()
    has = BATCH["next_sentence"] >= 0
    sentence = losses(sentences, BATCH["next_sentence"])[has].mean()
    assert loss == pytest.approx(word + sentence, rel=1e-5)
    assert metrics == pytest.approx(
        {"word_loss": word, "sentence_loss": sentence}, rel=1e-5
    )


def test_masked_words_are_weighted_and_padding_is_none():
    loss, _, logits = run("masked")
    right = (losses(logits, LABELS) * WEIGHTS).sum() / WEIGHTS.sum()
    assert loss == pytest.approx(right, rel=1e-5)
    evaluated = functools.partial(masked_word_accuracy, model_of("masked"))
    found, metrics = jax.jit(evaluated)(on_device(given()))
    assert float(mean(found)) == pytest.approx(right, rel=1e-5)
    hits = ((np.asarray(logits).argmax(-1) == LABELS) * WEIGHTS).sum() / WEIGHTS.sum()
    assert float(mean(metrics["accuracy"])) == pytest.approx(hits, rel=1e-5)


def test_classes_are_means_over_rows_and_tokens():
    loss, metrics, logits = run("sequence")
    has = BATCH["label"] >= 0
    own = losses(logits, BATCH["label"])[has]
    assert loss == pytest.approx(own.mean(), rel=1e-5)
    hits = np.asarray(logits).argmax(-1) == BATCH["label"]
    assert metrics["accuracy"] == pytest.approx(hits[has].mean())
    loss, _, logits = run("tokens")
    right = (losses(logits, LABELS) * WEIGHTS).sum() / WEIGHTS.sum()
    assert loss == pytest.approx(right, rel=1e-5)


def test_packed_segments_are_padding_where_they_are_zero():
    segments = np.array([[1, 1, 2, 2, 0, 0]] * 3)
    batch = given(attention_mask=None, weights=None, segment_ids=segments)
    np.testing.assert_array_equal(
        word_weights(batch), ((LABELS >= 0) & (segments > 0)).astype(np.float32)
    )


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("masked", {"tokens": None}, r"but a BERT reads 'tokens' \[B, T\]"),
        ("masked", {"labels": None}, r"but the loss reads 'labels'"),
        ("masked", {"labels": LABELS[:, 1:]}, r"'labels' has shape \(3, 5\), but must"),
        ("masked", {"weights": LABELS[:2]}, r"'weights' has shape \(2, 6\), but must"),
        ("masked", {"token_types": LABELS[:, :2]}, r"'token_types' has shape \(3, 2\)"),
        ("masked", {"segment_ids": LABELS}, r"'attention_mask' and 'segment_ids' both"),
        ("pretraining", {"next_sentence": None}, r"the loss reads 'next_sentence'"),
        ("pretraining", {}, r"no 'words_per_sentence', .*pretraining_batch\(batch\)"),
        ("sequence", {"label": None}, r"but the loss reads 'label'"),
        ("sequence", {"label": LABELS}, r"'label' has shape .* one entry per row"),
        ("tokens", {"labels": None}, r"but the loss reads 'labels'"),
    ],
)
def test_what_lacks_or_does_not_fit_is_named(task: str, change: dict, message: str):
    def model(*_: Any, **__: Any) -> jax.Array:
        return jnp.zeros((*SHAPE, 13))

    loss_fn = make_bert_loss(config_of(task))
    with pytest.raises(ValueError, match=message):
        loss_fn(model, on_device(given(**change)))


def test_words_of_all_processes_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    other = np.array([10.0, 4.0])
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda own: np.stack([own, other])
    )
    found = pretraining_batch(given())["words_per_sentence"].value
    assert found == pytest.approx((WEIGHTS.sum() + 10) / (2 + 4), rel=1e-6)


def test_a_batch_without_pairs_has_no_second_mean():
    batch = pretraining_batch(given(next_sentence=np.full(3, -1)))
    assert np.isfinite(batch["words_per_sentence"].value)
    with pytest.raises(ValueError, match="the loss reads 'next_sentence'"):
        pretraining_batch(given(next_sentence=None))
