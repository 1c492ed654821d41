"""What does a classifier of images minimise, and how often is it right?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.models.experts.stream import RouterLosses
from jaxpar.step.weighted import Weighted
from jaxpar.types import Batch


def classification_loss(
    model: Callable[..., Any], batch: Batch, *, label_smoothing: float = 0.0
) -> Any:
    """Sum the cross entropy of labels, in nats, and the losses of routers.

    Args:
      model: maps images [B, H, W, C] to logits [B, V], or to (logits,
        `jaxpar.models.experts.stream.RouterLosses`).
      batch: "image" and "label", [B] integers from 0 to V - 1; another gives NaN.
      label_smoothing: share of a label that is spread over all classes.

    Returns:
      The sum over images and their number, fp32; of a model with experts also its
      metrics.

    Raises:
      ValueError: if an entry is missing, there is not one label per image, or
        `label_smoothing` is not a fraction.

    Example:
      >>> uniform = lambda image_BHWC: jnp.zeros((len(image_BHWC), 10))
      >>> batch = {"image": jnp.zeros((2, 8, 8, 3)), "label": jnp.array([3, 7])}
      >>> loss = classification_loss(uniform, batch)
      >>> round(float(loss.total / loss.weight), 4)
      2.3026

    Source: Szegedy et al., "Rethinking the Inception Architecture" (2016), section 7,
    for label smoothing.
    """
    _require_share(label_smoothing)
    image_BHWC, label_B = _images_and_labels(batch)
    logits_BV, router = _logits_and_router(model(image_BHWC))
    loss = _sum_of_losses(logits_BV, label_B, label_smoothing)
    if router is None:
        return loss
    return Weighted(loss.total + router.loss * loss.weight, loss.weight), router.metrics


def classification_metrics(
    model: Callable[..., Any], batch: Batch
) -> tuple[Weighted, dict[str, Weighted]]:
    """Sum the cross entropy of labels, and count those that are the most likely.

    Args:
      model: as in `classification_loss`.
      batch: likewise.

    Returns:
      (the loss; "accuracy": the number of right images and that of all), for
      ``jaxpar.initialize(eval_fn=...)``.

    Raises:
      ValueError: as `classification_loss`.

    Example:
      >>> sure = lambda image_BHWC: jnp.eye(10)[:2]
      >>> batch = {"image": jnp.zeros((2, 8, 8, 3)), "label": jnp.array([0, 7])}
      >>> right = classification_metrics(sure, batch)[1]["accuracy"]
      >>> float(right.total), float(right.weight)
      (1.0, 2.0)
    """
    image_BHWC, label_B = _images_and_labels(batch)
    logits_BV, _ = _logits_and_router(model(image_BHWC))
    loss = _sum_of_losses(logits_BV, label_B, 0.0)
    hits = (logits_BV.argmax(-1) == label_B).sum(dtype=jnp.float32)
    return loss, {"accuracy": Weighted(hits, loss.weight)}


def _require_share(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            f"classification_loss: label_smoothing={label_smoothing} must be at least "
            "0 and below 1; it is the share that is spread over all classes."
        )


def _images_and_labels(batch: Batch) -> tuple[Any, Any]:
    missing = [name for name in ("image", "label") if name not in batch]
    if missing:
        raise ValueError(
            f"batch: it has {', '.join(batch)}, but not {', '.join(missing)}; give "
            "'image' [B, H, W, C] and 'label' [B]."
        )
    image_BHWC, label_B = batch["image"], batch["label"]
    if label_B.shape != image_BHWC.shape[:1]:
        raise ValueError(
            f"batch: label has shape {label_B.shape}, but there are "
            f"{image_BHWC.shape[0]} images; give one label per image, [B]."
        )
    return image_BHWC, label_B


def _logits_and_router(found: Any) -> tuple[jax.Array, RouterLosses | None]:
    return found if isinstance(found, tuple) else (found, None)


def _sum_of_losses(
    logits_BV: jax.Array, label_B: Any, label_smoothing: float
) -> Weighted:
    log_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
    chosen = log_BV.at[jnp.arange(len(label_B)), label_B]
    own_B = chosen.get(mode="fill", fill_value=jnp.nan)
    found_B = (1 - label_smoothing) * own_B + label_smoothing * log_BV.mean(-1)
    return Weighted(-found_B.sum(), jnp.float32(len(label_B)))
