"""Which words of a row are hidden for a model to predict? Others each time it is read.

A row's mask depends only on the seed and the row's place in the stream, so a run that
resumes, on any machines, sees the masks that it would have seen.
"""

from collections.abc import Collection, Mapping
from typing import Any

import grain
import jax
import numpy as np

from jaxpar.data.rows import RowSource

NO_LABEL = -100
"""The label of a place that is not predicted."""

_MASKED, _RANDOM = 0.8, 0.1
"""Shares of the chosen words that become the mask token, and a random word."""


class MaskedRows:
    """Rows of another source, with words hidden.

    Of each row, a share of the words is chosen: exactly that share, rounded, and at
    least one. Of the chosen words 80 % become the mask token, 10 % a random word, and
    10 % stay. A row has "tokens" [T], "labels" [T] (the word that was there; `NO_LABEL`
    at places that are not chosen), and the "segment_ids" and "positions" that the
    source has; tokens of segment 0 are padding. A source's "weights" are left out: they
    are of next tokens.

    Each epoch has other masks, and an evaluation (``repeat=False``) the same masks each
    time. To mix sources, mask their `jaxpar.data.Mixture`.

    Args:
      source: rows of tokens, such as `jaxpar.data.Windows` or
        `jaxpar.data.PackedDocuments`.
      mask_id: the mask token, which no text contains.
      num_words: random words are drawn from the ids below it.
      share: fraction of the words that is chosen.
      never: ids that are never chosen, such as the end of a document.
      seed: of the masks.

    Raises:
      ValueError: if a number is out of its range, or the rows have no tokens.

    Example:
      >>> from jaxpar.data import Tokens, Windows
      >>> tokens = Tokens((np.arange(21, dtype=np.uint8),), files=("digits",))
      >>> rows = MaskedRows(Windows(tokens, seq_len=9), mask_id=31, num_words=31)
      >>> row = rows.read([0])
      >>> row["tokens"].tolist(), int((row["labels"] >= 0).sum())
      ([[0, 1, 2, 3, 31, 5, 31, 7, 8, 9]], 2)

    Source: Devlin et al., "BERT" (2019), section 3.1; Liu et al., "RoBERTa" (2019),
    section 4.1, for masks that differ from epoch to epoch.
    """

    def __init__(
        self,
        source: RowSource,
        *,
        mask_id: int,
        num_words: int,
        share: float = 0.15,
        never: Collection[int] = (),
        seed: int = 0,
    ):
        if "tokens" not in source.shapes:
            raise ValueError(
                f"source: its rows have {', '.join(source.shapes)}, but masks are of "
                "'tokens'; give Windows, PackedDocuments or a Mixture of them."
            )
        if not 0 < share < 1:
            raise ValueError(
                f"share={share} must be above 0 and below 1; it is the fraction of "
                "words that is predicted."
            )
        for name, value in {"mask_id": mask_id, "seed": seed}.items():
            if value < 0:
                raise ValueError(
                    f"{name}={value} must not be negative; give 0 or more."
                )
        if num_words < 1:
            raise ValueError(
                f"num_words={num_words} must be at least 1: random words are drawn "
                "from the ids below it."
            )
        self.source, self.mask_id, self.num_words = source, mask_id, num_words
        self.share, self.seed = share, seed
        self._never = np.array(sorted({*never, mask_id}))

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one row."""
        return masked_shapes(self.source.shapes)

    @property
    def padding(self) -> float:
        """Fraction of the rows' tokens that are padding."""
        return self.source.padding

    @property
    def description(self) -> str:
        """The source's, and the share that is predicted."""
        return f"{self.source.description}, {self.share:.0%} of words masked"

    def __len__(self) -> int:
        return len(self.source)

    def read(self, numbers: Collection[int]) -> dict[str, np.ndarray]:
        """Read rows.

        Args:
          numbers: as `order` gives them, of a row and its place in the stream; a row's
            own number is at place 0.
        """
        places, own = zip(*(divmod(n, len(self)) for n in numbers), strict=True)
        batch = {k: x for k, x in self.source.read(own).items() if k != "weights"}
        batch["tokens"] = batch["tokens"].copy()  # A source may give views.
        batch["labels"] = np.full_like(batch["tokens"], NO_LABEL)
        for index, place in enumerate(places):
            self._mask({name: array[index] for name, array in batch.items()}, place)
        return batch

    def _mask(self, row: dict[str, np.ndarray], place: int) -> None:
        """Hide words of one row, in its arrays."""
        rng = np.random.default_rng([self.seed, place])
        tokens = row["tokens"]
        is_word = ~np.isin(tokens, self._never)
        if "segment_ids" in row:
            is_word &= row["segment_ids"] > 0
        words = np.flatnonzero(is_word)
        if not len(words):
            return
        count = max(1, round(self.share * len(words)))
        chosen = rng.permutation(words)[:count]
        row["labels"][chosen] = tokens[chosen]
        kind = rng.random(count)
        random = rng.integers(0, self.num_words, count)
        tokens[chosen] = np.select(
            [kind < _MASKED, kind < _MASKED + _RANDOM],
            [self.mask_id, random],
            tokens[chosen],
        )

    def identity(self) -> dict[str, Any]:
        """How words are hidden, and the source's."""
        return {
            "mask_id": self.mask_id,
            "num_words": self.num_words,
            "mask_share": self.share,
            "mask_seed": self.seed,
            "never_masked": self._never.tolist(),
            **self.source.identity(),
        }

    def order(self, *, seed: int, shuffle: bool, repeat: bool) -> grain.MapDataset[int]:
        """The stream of rows; each number is of a row and of its place in the stream.

        A place has its own random numbers, so that epochs differ.
        """
        order = self.source.order(seed=seed, shuffle=shuffle, repeat=repeat)
        size = len(self)
        return order.map_with_index(lambda place, number: place * size + number)


def masked_shapes(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of masked rows, or of a batch of them, without any data.

    Args:
      shapes: of the rows of a source, or by `jaxpar.data.batch_shapes` of a batch.

    Example:
      >>> from jaxpar.data import batch_shapes
      >>> {k: x.shape for k, x in masked_shapes(batch_shapes(2, 7)).items()}
      {'tokens': (2, 8), 'labels': (2, 8)}
    """
    given = {name: x for name, x in shapes.items() if name != "weights"}
    return {**given, "labels": given["tokens"]}
