"""What does a decoder minimise: the cross entropy of each next token."""

from collections.abc import Callable
from typing import Any

from jaxpar.losses import read_targets
from jaxpar.step.weighted import Weighted
from jaxpar.types import Batch


def decoder_loss(model: Callable[..., Any], batch: Batch) -> Any:
    """Sum the next-token cross entropy, in nats, and the losses of routers.

    The head computes it, a chunk of tokens at a time, so that logits are never held
    whole (`jaxpar.losses.cross_entropy`). For a model that returns logits there is
    `jaxpar.losses.next_token_loss`.

    Args:
      model: of `make_decoder`.
      batch: "tokens", "weights" and, of a packed batch, "segment_ids" and "positions",
        as `jaxpar.losses.read_targets` takes them.

    Returns:
      The weighted sum over targets and the sum of weights, fp32; of a model with
      experts also metrics: the routers' losses, the largest load of an expert in units
      of the mean, and the share of choices that were dropped.

    Raises:
      ValueError: as `jaxpar.losses.read_targets` does.
    """
    inputs_BT, targets_BT, weights_BT, keywords = read_targets(batch)
    found = model(inputs_BT, targets_BT=targets_BT, weights_BT=weights_BT, **keywords)
    if not isinstance(found, tuple):
        return Weighted(found, weights_BT.sum())
    total, metrics = found
    return Weighted(total, weights_BT.sum()), metrics
