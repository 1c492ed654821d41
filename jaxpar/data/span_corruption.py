"""What do rows of text become where a model fills in what is missing, as T5 does?

Spans of a window are cut out. The inputs have a sentinel in the place of each, the
labels each sentinel and what was cut out behind it.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import grain
import jax
import numpy as np
from jaxtyping import Int32

from jaxpar.data.rows import batched, ordered
from jaxpar.data.tokens import Tokens
from jaxpar.data.windows import corpus_identity, read_ids


@dataclasses.dataclass(frozen=True)
class SpanLengths:
    """How long a window is, and what becomes of it.

    Attributes:
      window: tokens of text.
      noise: of them, those that are cut out.
      spans: in which they are cut out.
      inputs: tokens that the encoder reads.
      labels: tokens that the decoder writes.
    """

    window: int
    noise: int
    spans: int
    inputs: int
    labels: int


def span_lengths(
    input_len: int,
    *,
    noise_share: float = 0.15,
    mean_span: float = 3.0,
    has_end: bool = False,
) -> SpanLengths:
    """Compute the longest window whose inputs have a length.

    Rows are full, so that nothing is padding: a token more of text gives at most one
    more of the inputs.

    Args:
      input_len: tokens that the encoder reads.
      noise_share: of a window, the share that is cut out, rounded to whole tokens.
      mean_span: tokens of a span, on average.
      has_end: whether inputs and labels have a token behind their last.

    Returns:
      The lengths.

    Raises:
      ValueError: if a number is out of range, or `input_len` is too short for a span.

    Example:
      >>> span_lengths(512, has_end=True)  # T5's
      SpanLengths(window=568, noise=85, spans=28, inputs=512, labels=114)

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
    Text-to-Text Transformer" (2020), section 3.1.4.
    """
    if not 0 < noise_share < 1:
        raise ValueError(
            f"span_lengths: noise_share={noise_share} must be above 0 and below 1; it "
            "is the share that is cut out, T5's is 0.15."
        )
    if not 1 <= mean_span < np.inf:
        raise ValueError(
            f"span_lengths: mean_span={mean_span} must be at least 1 token; T5's is 3."
        )
    least = 2 + has_end
    if input_len < least:
        raise ValueError(
            f"span_lengths: input_len={input_len} must be at least {least}: a token "
            f"of text and a sentinel{', and the end' if has_end else ''}."
        )

    def of(window: int) -> SpanLengths:
        noise = min(max(round(window * noise_share), 1), window - 1)
        spans = max(round(noise / mean_span), 1)
        spans = min(spans, noise, window - noise)
        inputs = window - noise + spans + has_end
        return SpanLengths(window, noise, spans, inputs, noise + spans + has_end)

    # Inputs are at most as long as the window and at least as long as what is kept.
    window = input_len
    while of(window + 1).inputs <= input_len:
        window += 1
    while of(window).inputs > input_len:
        window -= 1
    found = of(window)
    if found.inputs != input_len:
        raise ValueError(
            f"span_lengths: noise_share={noise_share} and mean_span={mean_span} give "
            f"inputs of {found.inputs} and {of(window + 1).inputs} tokens, but not of "
            f"input_len={input_len}; give one of those, or a noise_share below 0.5."
        )
    return found


class SpanCorruption:
    """Windows of a corpus of which spans are cut out, for an encoder and a decoder.

    A row has "inputs" [S] and "labels" [T], int32. Windows follow each other without
    overlap, over the ends of documents. Which spans are cut out depends on (seed,
    epoch, window) alone: a run that resumes sees the same, and each epoch others.
    Sentinel i is token ``vocab_size - 1 - i``.

    Args:
      tokens: the corpus, of ids below the sentinels.
      input_len: tokens of the inputs, S.
      vocab_size: of the model.
      noise_share: of a window, the share that is cut out.
      mean_span: tokens of a span, on average.
      end_id: what stands behind the last token of inputs and labels; None for nothing.
      seed: of the spans, a non-negative integer; the order has its own.

    Raises:
      ValueError: if a number is out of range, the corpus has ids of sentinels, no
        whole window, or prompts that are not learned.

    Example:
      >>> tokens = Tokens((np.arange(10, dtype=np.uint8),), ("digits",))
      >>> row = SpanCorruption(tokens, input_len=9, vocab_size=16).read([0])
      >>> row["inputs"].tolist(), row["labels"].tolist()
      ([[0, 1, 2, 3, 4, 5, 6, 7, 15]], [[15, 8, 9]])

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
    Text-to-Text Transformer" (2020), section 3.1.4.
    """

    padding = 0.0

    def __init__(
        self,
        tokens: Tokens,
        *,
        input_len: int,
        vocab_size: int,
        noise_share: float = 0.15,
        mean_span: float = 3.0,
        end_id: int | None = None,
        seed: int = 0,
    ):
        how = {"noise_share": noise_share, "mean_span": mean_span}
        self.lengths = span_lengths(input_len, **how, has_end=end_id is not None)
        self.tokens, self.vocab_size, self.end_id = tokens, vocab_size, end_id
        self._shares, self._seed = how, seed
        _check_corpus(tokens, self.lengths, vocab_size)
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative; give 0 or more.")

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one row."""
        return span_shapes(self.lengths)

    @property
    def description(self) -> str:
        """Numbers of tokens and windows, and their lengths."""
        own = self.lengths
        return (
            f"{len(self.tokens):,} tokens{self.tokens.remark}, {len(self):,} windows "
            f"of {own.window}: {own.noise} tokens in {own.spans} spans cut out"
        )

    def __len__(self) -> int:
        return len(self.tokens) // self.lengths.window

    def read(self, numbers: Collection[int]) -> dict[str, np.ndarray]:
        """Read rows.

        Args:
          numbers: as `order` gives them: in a later epoch, the number of rows is added
            for each epoch before.

        Raises:
          ValueError: if the corpus has the id of a sentinel.
        """
        rows = [self._row(*divmod(number, len(self))) for number in numbers]
        inputs, labels = zip(*rows, strict=True)
        return {"inputs": np.stack(inputs), "labels": np.stack(labels)}

    def identity(self) -> dict[str, Any]:
        """What the rows depend on."""
        return {
            "spans": dataclasses.asdict(self.lengths),
            "spans_seed": self._seed,
            "vocab_size": self.vocab_size,
            "end_id": self.end_id,
            **corpus_identity(self.tokens),
        }

    def order(self, *, seed: int, shuffle: bool, repeat: bool) -> grain.MapDataset[int]:
        """The stream of rows, whose numbers go on from epoch to epoch."""
        num = len(self)
        order = ordered(num, seed=seed, shuffle=shuffle, repeat=repeat)
        return order.map_with_index(lambda place, row: place // num * num + row)

    def _row(
        self, epoch: int, window: int
    ) -> tuple[Int32[np.ndarray, "S"], Int32[np.ndarray, "T"]]:
        own, start = self.lengths, window * self.lengths.window
        ids = read_ids(self.tokens, start, start + own.window)
        if ids.max() >= self.vocab_size - own.spans:
            at = start + int(ids.argmax())
            raise ValueError(
                f"token {at:,} of the corpus has id {ids.max()}, but from "
                f"{self.vocab_size - own.spans:,} on ids are sentinels; give a larger "
                "vocab_size, or a smaller tokenizer."
            )
        drawn = np.random.default_rng((self._seed, epoch, window))
        kept = _divide(drawn, own.window - own.noise, own.spans)
        cut = _divide(drawn, own.noise, own.spans)
        # A window begins with what is kept and ends with a span.
        ends = np.stack([kept, cut], axis=1).reshape(-1).cumsum()
        pieces = np.split(ids, ends[:-1])
        inputs, labels = [], []
        for number in range(own.spans):
            sentinel = [self.vocab_size - 1 - number]
            inputs += [pieces[2 * number], sentinel]
            labels += [sentinel, pieces[2 * number + 1]]
        end = [] if self.end_id is None else [[self.end_id]]
        joined = (np.concatenate(side + end) for side in (inputs, labels))
        inputs_S, labels_T = (side.astype(np.int32) for side in joined)
        return inputs_S, labels_T


def span_shapes(lengths: SpanLengths) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one row, without any."""
    sizes = {"inputs": lengths.inputs, "labels": lengths.labels}
    return {name: jax.ShapeDtypeStruct((n,), np.int32) for name, n in sizes.items()}


def span_batch_shapes(
    batch_size: int, lengths: SpanLengths
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of rows, without any data.

    Args:
      batch_size: rows.
      lengths: of a row.

    Example:
      >>> {k: x.shape for k, x in span_batch_shapes(8, span_lengths(128)).items()}
      {'inputs': (8, 128), 'labels': (8, 28)}
    """
    return batched(span_shapes(lengths), batch_size)


def require_whole_text(tokens: Tokens) -> None:
    """Raise ValueError if a part of a corpus is not learned: spans are cut out of all.

    Args:
      tokens: the corpus.
    """
    if tokens.loss_mask is not None:
        raise ValueError(
            f"tokens: {tokens.files[0]!r} has prompts that are not learned, but spans "
            "are cut out of all text; give text without them."
        )


def _divide(drawn: np.random.Generator, total: int, num: int) -> np.ndarray:
    """Lengths [num], each at least 1, of `total` together, all ways alike."""
    cuts = np.sort(drawn.choice(total - 1, num - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)


def _check_corpus(tokens: Tokens, lengths: SpanLengths, vocab_size: int) -> None:
    require_whole_text(tokens)
    if len(tokens) < lengths.window:
        raise ValueError(
            f"tokens: the corpus{tokens.remark} has {len(tokens):,} tokens, but a "
            f"window {lengths.window:,} for input_len={lengths.inputs}; give more "
            "data, or a smaller input_len."
        )
    if lengths.spans >= vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size:,} is too small for {lengths.spans} sentinels; "
            "give a larger vocabulary, or a smaller input_len."
        )
    known = tokens.vocab_size
    if known is not None and known > vocab_size - lengths.spans:
        raise ValueError(
            f"vocab_size={vocab_size:,} has {lengths.spans} sentinels at its end, and "
            f"the corpus {known:,} ids, which reach into them; give a vocab_size of at "
            f"least {known + lengths.spans:,}, or a smaller tokenizer."
        )
