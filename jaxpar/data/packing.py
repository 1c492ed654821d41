"""Which documents make a row, where none may see another? Packed ones, in segments.

The packing is computed once, from the lengths of the documents, so that any row can be
read at any time. Grain's packing is an iterator: a run that resumes at row n would read
all rows before it.
"""

import functools
import hashlib
from collections.abc import Collection
from typing import Any

import grain
import jax
import numpy as np

from jaxpar.data.best_fit import pack
from jaxpar.data.disk_array import DiskArray
from jaxpar.data.rows import batched, ordered
from jaxpar.data.tokens import Tokens
from jaxpar.data.windows import (
    Windows,
    check_seq_len,
    corpus_identity,
    read_ids,
    window_shapes,
)

_MASK_BYTES = 1 << 22
"""Of the loss mask that are read at a time."""


class PackedDocuments:
    """Documents packed into rows of ``seq_len + 1`` tokens.

    A document of more tokens is cut into pieces of ``seq_len + 1`` that overlap by one
    token, each a document of its own from then on: so every token but a document's
    first is a target once. A document of one token has no target and is left out, and
    so is a piece of which nothing is learned, such as the middle of a long prompt. Rows
    are the same in each epoch, in another order.

    A row has, besides "tokens" [T + 1]:

    * "segment_ids" [T + 1]: 1, 2, ... for its documents, 0 for padding at the end;
    * "positions" [T + 1]: 0, 1, ... in each document;
    * "weights" [T]: of predicting tokens[t + 1]; 1 where both tokens are of one
      document, and learned if the corpus has a ``loss_mask``.

    The packing takes 12 bytes a document in memory, and about 60 while it is computed.

    Args:
      tokens: the corpus, with ``starts`` of its documents.
      seq_len: targets per row, T.

    Raises:
      ValueError: if `seq_len` is not positive, or the documents' starts are missing,
        not ascending from 0, or leave no document of two tokens, or nothing is to be
        learned.

    Example:
      >>> starts = np.array([0, 3])
      >>> tokens = Tokens((np.arange(5, dtype=np.uint8),), ("digits",), starts=starts)
      >>> row = PackedDocuments(tokens, seq_len=5).read([0])
      >>> row["tokens"].tolist(), row["segment_ids"].tolist()
      ([[0, 1, 2, 3, 4, 0]], [[1, 1, 1, 2, 2, 0]])
      >>> row["positions"].tolist(), row["weights"].tolist()
      ([[0, 1, 2, 0, 1, 0]], [[1.0, 1.0, 0.0, 1.0, 0.0]])
    """

    def __init__(self, tokens: Tokens, *, seq_len: int):
        check_seq_len(seq_len)
        check_pack(tokens, pack=True)
        self._document_starts = np.ascontiguousarray(tokens.starts, np.int64)
        self.tokens, self.seq_len = tokens, seq_len
        starts, lengths = _pieces(self._document_starts, len(tokens), seq_len)
        num_pieces = len(starts)
        if tokens.loss_mask is not None:
            learned = _has_learned(tokens.loss_mask, starts, lengths)
            starts, lengths = starts[learned], lengths[learned]
        self._num_left_out = num_pieces - len(starts)
        if not len(starts):
            raise ValueError(
                f"tokens: nothing of the corpus{tokens.remark} is to be learned in its "
                f"{num_pieces:,} pieces; give documents with answers."
            )
        rows = pack(lengths, seq_len + 1)
        by_row = np.argsort(rows, kind="stable")
        self._starts, self._lengths = starts[by_row], lengths[by_row]
        # Row r has pieces [firsts[r], firsts[r + 1]).
        self._firsts = np.concatenate([[0], np.bincount(rows).cumsum()])

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one row."""
        return packed_shapes(self.seq_len)

    @property
    def padding(self) -> float:
        """Fraction of the rows' tokens that are padding."""
        total = len(self) * (self.seq_len + 1)
        return 1 - int(self._lengths.sum(dtype=np.int64)) / total

    @property
    def description(self) -> str:
        """Numbers of documents and rows, and how full these are."""
        num = self._num_left_out
        left_out = f"; {num:,} pieces with nothing to learn left out" if num else ""
        return (
            f"{len(self._document_starts):,} documents{self.tokens.remark} packed in "
            f"{len(self):,} rows of seq_len={self.seq_len}, {self.padding:.2%} padding"
            f"{left_out}"
        )

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def read(self, numbers: Collection[int]) -> dict[str, np.ndarray]:
        """Read rows."""
        batch = {
            name: np.zeros((len(numbers), *row.shape), row.dtype)
            for name, row in self.shapes.items()
        }
        for place, number in enumerate(numbers):
            self._fill({name: array[place] for name, array in batch.items()}, number)
        return batch

    def _fill(self, row: dict[str, np.ndarray], number: int) -> None:
        """Write the documents of a row into one that is zero."""
        at, mask = 0, self.tokens.loss_mask
        pieces = range(self._firsts[number], self._firsts[number + 1])
        for segment, piece in enumerate(pieces, start=1):
            start, length = int(self._starts[piece]), int(self._lengths[piece])
            stop = at + length
            row["tokens"][at:stop] = read_ids(self.tokens, start, start + length)
            row["segment_ids"][at:stop] = segment
            row["positions"][at:stop] = np.arange(length)
            learned = 1 if mask is None else mask[start + 1 : start + length]
            row["weights"][at : stop - 1] = learned
            at = stop

    def identity(self) -> dict[str, Any]:
        """The length of a row, the corpus, and its documents."""
        num = self._num_left_out
        left_out = {"pieces_left_out": num} if num else {}
        return {
            "packed": True,
            "seq_len": self.seq_len,
            **left_out,
            **corpus_identity(self.tokens),
            "starts_sha256": self._starts_sha256,
        }

    @functools.cached_property
    def _starts_sha256(self) -> str:
        return hashlib.sha256(self._document_starts).hexdigest()

    def order(self, *, seed: int, shuffle: bool, repeat: bool) -> grain.MapDataset[int]:
        """The stream of rows."""
        return ordered(len(self), seed=seed, shuffle=shuffle, repeat=repeat)


def packed_shapes(seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one row of packed documents, without any.

    Args:
      seq_len: targets per row.
    """
    names = ("tokens", "segment_ids", "positions")
    shapes = {name: jax.ShapeDtypeStruct((seq_len + 1,), np.int32) for name in names}
    return {**shapes, "weights": jax.ShapeDtypeStruct((seq_len,), np.float32)}


def batch_shapes(
    batch_size: int, seq_len: int, *, pack: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of windows, or of packed documents, without any data.

    Args:
      batch_size: rows.
      seq_len: targets per row.
      pack: whether documents are packed.

    Example:
      >>> {k: x.shape for k, x in batch_shapes(2, 8).items()}
      {'tokens': (2, 9)}
    """
    row = packed_shapes(seq_len) if pack else window_shapes(seq_len)
    return batched(row, batch_size)


def rows_of(
    tokens: Tokens, seq_len: int, *, pack: bool = False
) -> "Windows | PackedDocuments":
    """Cut a corpus into windows, or pack its documents.

    Args:
      tokens: the corpus.
      seq_len: targets per row.
      pack: whether documents are packed, none of which sees another.

    Raises:
      ValueError: if only a part of the corpus is to be learned, and `pack` is False: a
        window would cut answers from their prompts.
    """
    check_pack(tokens, pack)
    return (PackedDocuments if pack else Windows)(tokens, seq_len=seq_len)


def check_pack(tokens: Tokens, pack: bool) -> None:
    """Raise ValueError if a corpus can't be packed, or should not be cut in windows.

    Args:
      tokens: the corpus.
      pack: whether its documents are packed.
    """
    if tokens.loss_mask is not None and not pack:
        raise ValueError(
            f"pack=False: {tokens.files[0]!r} has prompts that are not learned, and a "
            "window would cut them from their answers; give --pack (pack=True)."
        )
    if tokens.starts is None and pack:
        raise ValueError(
            "tokens: the corpus has no document starts, which packing needs; read "
            "documents, give Tokens(starts=...), or use windows (Loader(tokens, "
            "seq_len=...))."
        )


def _pieces(
    starts: np.ndarray, num_tokens: int, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents so that none is longer than a row.

    Returns:
      (position of each piece's first token, int64; its number of tokens, int32).
    """
    sizes = np.diff(starts, append=num_tokens)
    num_pieces = np.maximum(-(-(sizes - 1) // seq_len), 0)
    total = int(num_pieces.sum())
    if not total:
        raise ValueError(
            f"tokens: none of the {len(starts):,} documents has two tokens, and so a "
            "target; give longer documents."
        )
    before = np.repeat(num_pieces.cumsum() - num_pieces, num_pieces)
    offsets = (np.arange(total) - before) * seq_len
    left = np.repeat(sizes, num_pieces) - offsets
    lengths = np.minimum(left, seq_len + 1).astype(np.int32)
    return np.repeat(starts, num_pieces) + offsets, lengths


def _has_learned(
    mask: np.ndarray | DiskArray, starts: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Whether each piece has a token to be learned after its first."""
    found = np.zeros(len(starts), bool)
    for at in range(0, len(mask), _MASK_BYTES):
        places = at + np.flatnonzero(mask[at : at + _MASK_BYTES])
        # The first token of a piece is a target of the one before, if they overlap.
        pieces = np.searchsorted(starts, places, side="left") - 1
        is_inside = (pieces >= 0) & (places < starts[pieces] + lengths[pieces])
        found[pieces[is_inside]] = True
    return found
