"""What does a classifier of images minimise: the cross entropy of the labels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.step.weighted import Weighted
from jaxpar.types import Batch


def classification_loss(
    model: Callable[..., jax.Array], batch: Batch, *, label_smoothing: float = 0.0
) -> Weighted:
    """Sum the cross entropy of labels, in nats.

    Args:
      model: maps images [B, H, W, C] to logits [B, V].
      batch: "image" and "label", [B] integers from 0 to V - 1; another gives NaN.
      label_smoothing: share of a label that is spread over all classes.

    Returns:
      The sum over images and their number, fp32.

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
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            f"classification_loss: label_smoothing={label_smoothing} must be at least "
            "0 and below 1; it is the share that is spread over all classes."
        )
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
    log_BV = jax.nn.log_softmax(model(image_BHWC).astype(jnp.float32))
    chosen = log_BV.at[jnp.arange(len(label_B)), label_B]
    own_B = chosen.get(mode="fill", fill_value=jnp.nan)
    found_B = (1 - label_smoothing) * own_B + label_smoothing * log_BV.mean(-1)
    return Weighted(-found_B.sum(), jnp.float32(len(label_B)))
