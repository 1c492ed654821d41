"""Which tokens make a row, where a corpus is one long text? Windows of equal length."""

from collections.abc import Collection
from typing import Any

import grain
import jax
import numpy as np
from jaxtyping import Int32

from jaxpar.data.rows import ordered
from jaxpar.data.tokens import Tokens

_MAX_ID = np.iinfo(np.int32).max


class Windows:
    """Windows of ``seq_len + 1`` tokens that start ``seq_len`` apart.

    So every token but the first is a target once. A row has "tokens" [T + 1], and
    "weights" [T] if the corpus has a ``loss_mask``: the weight of predicting
    tokens[t + 1], 1 or 0.

    Args:
      tokens: the corpus.
      seq_len: targets per row, T.

    Raises:
      ValueError: if `seq_len` is not positive, or the corpus has no window.

    Example:
      >>> tokens = Tokens((np.arange(9, dtype=np.uint8),), files=("digits",))
      >>> Windows(tokens, seq_len=4).read([1])
      {'tokens': array([[4, 5, 6, 7, 8]], dtype=int32)}
    """

    padding = 0.0

    def __init__(self, tokens: Tokens, *, seq_len: int):
        check_seq_len(seq_len)
        if len(tokens) <= seq_len:
            raise ValueError(
                f"tokens: the corpus{tokens.remark} has {len(tokens):,} tokens, but a "
                f"window of seq_len={seq_len} has {seq_len + 1:,}; give more data, or "
                "a smaller seq_len."
            )
        self.tokens, self.seq_len = tokens, seq_len

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one row."""
        shapes = window_shapes(self.seq_len)
        if self.tokens.loss_mask is not None:
            shapes["weights"] = jax.ShapeDtypeStruct((self.seq_len,), np.float32)
        return shapes

    @property
    def description(self) -> str:
        """Numbers of tokens and windows."""
        return (
            f"{len(self.tokens):,} tokens{self.tokens.remark}, {len(self):,} windows "
            f"of seq_len={self.seq_len}"
        )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def read(self, numbers: Collection[int]) -> dict[str, np.ndarray]:
        """Read windows."""
        length = self.seq_len
        starts = [number * length for number in numbers]
        ids = [read_ids(self.tokens, start, start + length + 1) for start in starts]
        rows: dict[str, np.ndarray] = {"tokens": np.stack(ids)}
        mask = self.tokens.loss_mask
        if mask is not None:
            learned = [mask[start + 1 : start + length + 1] for start in starts]
            rows["weights"] = np.stack(learned).astype(np.float32)
        return rows

    def identity(self) -> dict[str, Any]:
        """The length of a window, and the corpus."""
        return {"seq_len": self.seq_len, **corpus_identity(self.tokens)}

    def order(self, *, seed: int, shuffle: bool, repeat: bool) -> grain.MapDataset[int]:
        """The stream of windows."""
        return ordered(len(self), seed=seed, shuffle=shuffle, repeat=repeat)


def window_shapes(seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one window of `seq_len` targets, without any."""
    return {"tokens": jax.ShapeDtypeStruct((seq_len + 1,), np.int32)}


def read_ids(tokens: Tokens, start: int, stop: int) -> Int32[np.ndarray, "_"]:
    """Read token ids as a model takes them.

    Args:
      tokens: the corpus.
      start: position of the first id.
      stop: position after the last.

    Raises:
      ValueError: if an id is not below 2**31.
    """
    ids = tokens.read(start, stop)
    if not np.can_cast(ids.dtype, np.int32) and ids.max() > _MAX_ID:
        at = start + int(ids.argmax())
        raise ValueError(
            f"token {at:,} of the corpus has id {ids.max()}, but ids must be below "
            "2**31, because models take int32; check the file's dtype=."
        )
    return ids.astype(np.int32)


def corpus_identity(tokens: Tokens) -> dict[str, Any]:
    """Name a corpus by its hash, as JSON's types; reads all of it."""
    return {"num_tokens": len(tokens), "sha256": tokens.sha256}


def check_seq_len(seq_len: int) -> None:
    """Raise if the number of targets of a row is not positive."""
    if seq_len < 1:
        raise ValueError(
            f"seq_len={seq_len} must be at least 1; give a positive number."
        )
