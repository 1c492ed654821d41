"""Losses of language models that hold a chunk of the logits at a time."""

from jaxpar.lazy import load_modules
from jaxpar.losses.cross_entropy import cross_entropy
from jaxpar.losses.next_token import next_token_loss, read_targets

__all__ = ["cross_entropy", "next_token_loss", "read_targets"]

load_modules(globals())
