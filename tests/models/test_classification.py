"""Is the loss of a classifier the mean cross entropy, and what does it refuse?"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.models.classification import classification_loss, classification_metrics

LOGITS = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
BATCH = {"image": np.zeros((3, 2, 2, 1)), "label": np.array([4, 0, 2])}


def logits_of(image: Any) -> Any:
    return jnp.asarray(LOGITS[: len(image)])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_cross_entropy_of_optax(smoothing: float):
    loss = classification_loss(logits_of, BATCH, label_smoothing=smoothing)
    targets = optax.smooth_labels(jnp.eye(5)[BATCH["label"]], smoothing)
    want = optax.softmax_cross_entropy(LOGITS, targets).sum()
    assert float(loss.total) == pytest.approx(float(want), rel=1e-6)
    assert float(loss.weight) == 3


def test_label_that_there_is_not_gives_nan():
    loss = classification_loss(logits_of, {**BATCH, "label": np.array([5, 0, 2])})
    assert np.isnan(loss.total)


@pytest.mark.parametrize(
    ("change", "smoothing", "message"),
    [
        ({}, 1.0, r"label_smoothing=1.0 must be at least 0 and below 1"),
        ({"label": np.zeros((3, 1), int)}, 0.0, r"label has shape \(3, 1\), but .* 3 "),
        ({"label": None}, 0.0, r"batch: it has image, but not label; give 'image'"),
    ],
)
def test_batch_that_does_not_fit_raises(
    change: dict[str, Any], smoothing: float, message: str
):
    batch = {k: x for k, x in {**BATCH, **change}.items() if x is not None}
    with pytest.raises(ValueError, match=message):
        classification_loss(logits_of, batch, label_smoothing=smoothing)


def test_metrics_count_the_images_whose_label_is_the_most_likely():
    right = int((LOGITS.argmax(-1) == BATCH["label"]).sum())
    wrong = {**BATCH, "label": (LOGITS.argmax(-1) + 1) % 5}
    for batch, hits in ((BATCH, right), (wrong, 0)):
        loss, found = classification_metrics(logits_of, batch)
        assert float(found["accuracy"].total) == hits
        assert float(found["accuracy"].weight) == 3
        plain = classification_loss(logits_of, batch)
        assert float(loss.total) == float(plain.total)
