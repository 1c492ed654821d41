"""Are spans cut out as T5 does, full rows of them, and the same when a run resumes?"""

import re
from typing import Any

import numpy as np
import pytest

from jaxpar.data import Loader, Mixture, RowSource, SpanCorruption, Tokens, span_lengths
from jaxpar.data.span_corruption import SpanLengths, span_batch_shapes

VOCAB = 1024


def make_tokens(length: int = 900, **given: Any) -> Tokens:
    ids = np.arange(length, dtype=np.uint16)
    return Tokens((ids,), ("counting",), vocab_size=length, **given)


def rows_of(tokens: Tokens | None = None, **given: Any) -> SpanCorruption:
    how = {"input_len": 64, "vocab_size": VOCAB, **given}
    return SpanCorruption(tokens or make_tokens(), **how)


def restored(row: dict[str, np.ndarray], spans: int) -> list[int]:
    """The window that a row's inputs and labels were made of."""
    cut: dict[int, list[int]] = {}
    for token in row["labels"].tolist():
        if token >= VOCAB - spans:
            cut[token] = []
        else:
            cut[max(cut, key=list(cut).index)].append(token)
    found = []
    for token in row["inputs"].tolist():
        found += cut.pop(token) if token >= VOCAB - spans else [token]
    assert not cut
    return found


def test_lengths_are_those_of_t5() -> None:
    """Its published ones, with the end behind inputs and labels."""
    assert span_lengths(512, has_end=True) == SpanLengths(568, 85, 28, 512, 114)
    assert span_lengths(1024, has_end=True).labels == 229


@pytest.mark.parametrize("has_end", [False, True])
@pytest.mark.parametrize(("share", "mean"), [(0.15, 3.0), (0.5, 2.0), (0.3, 8.0)])
def test_rows_of_any_length_are_full(share: float, mean: float, has_end: bool) -> None:
    how = {"noise_share": share, "mean_span": mean, "has_end": has_end}
    for length in range(4, 300):
        found = span_lengths(length, **how)
        assert found.inputs == length
        assert found.inputs + found.labels == found.window + 2 * (found.spans + has_end)
        assert 1 <= found.spans <= min(found.noise, found.window - found.noise)
        assert abs(found.noise - share * found.window) <= 0.5 or found.noise == 1


def test_a_row_holds_its_window_and_sentinels_in_order() -> None:
    rows, own = rows_of(), span_lengths(64)
    assert isinstance(rows, RowSource)
    assert len(rows) == 900 // own.window
    read = rows.read([2, 0])
    for place, number in enumerate((2, 0)):
        row = {name: array[place] for name, array in read.items()}
        window = range(number * own.window, (number + 1) * own.window)
        assert restored(row, own.spans) == list(window)
        for side in row.values():
            sentinels = side[side >= VOCAB - own.spans]
            assert sentinels.tolist() == [VOCAB - 1 - i for i in range(own.spans)]
        assert row["inputs"][0] == window[0], "a window begins with what is kept"
        assert row["labels"][-1] == window[-1], "and ends with a span"
    shapes = {name: (x.shape, x.dtype) for name, x in rows.shapes.items()}
    assert shapes == {name: (x[0].shape, x.dtype) for name, x in read.items()}
    assert rows.description == (
        f"900 tokens, {len(rows)} windows of {own.window}: {own.noise} tokens in "
        f"{own.spans} spans cut out"
    )
    batch = span_batch_shapes(3, own)
    assert {name: x.shape for name, x in batch.items()} == {
        "inputs": (3, own.inputs),
        "labels": (3, own.labels),
    }


def test_the_end_stands_behind_both_sides() -> None:
    row = rows_of(end_id=1000).read([0])
    assert row["inputs"].shape == (1, 64)
    assert (row["inputs"][0, -1], row["labels"][0, -1]) == (1000, 1000)


def test_spans_are_of_all_lengths_and_of_the_mean() -> None:
    tokens = Tokens((np.zeros(300_000, np.uint16),), ("zeros",), vocab_size=1)
    rows, own = rows_of(tokens), span_lengths(64)
    found = rows.read(range(2000))["labels"]
    firsts = np.flatnonzero(found.reshape(-1) > 0)
    lengths = np.diff(firsts, append=found.size) - 1
    assert lengths.mean() == pytest.approx(own.noise / own.spans)
    assert lengths.min() == 1
    # Of n tokens in k spans, C(n - 1 - l, k - 2) of C(n - 1, k - 1) ways begin with l.
    share = (own.spans - 1) / (own.noise - 1)
    assert (lengths == 1).mean() == pytest.approx(share, rel=0.03)


def test_a_resumed_run_sees_the_same_spans_and_each_epoch_others() -> None:
    def loader() -> Loader:
        return Loader(rows_of(seed=3), batch_size=4, seed=1)

    one = loader()
    num = len(one.source)
    batches = [next(one) for _ in range(num)]  # Four epochs.
    other = loader()
    for _ in range(num // 2):
        next(other)
    resumed = loader()
    resumed.set_state(other.get_state())
    for right in batches[num // 2 :]:
        found = next(resumed)
        for name, array in right.items():
            np.testing.assert_array_equal(found[name], array)
    firsts = np.concatenate([batch["inputs"] for batch in batches])
    window = span_lengths(64).window
    of_first = firsts[firsts[:, 0] < window]
    assert len(of_first) == 4
    assert len(np.unique(of_first, axis=0)) == 4, "each epoch cuts out other spans"


def test_one_pass_reads_every_window_once_in_order() -> None:
    rows = rows_of()
    loader = Loader(rows, batch_size=2, repeat=False)
    found = np.concatenate([batch["inputs"] for batch in loader])
    starts = np.arange(len(found)) * rows.lengths.window
    np.testing.assert_array_equal(found[:, 0], starts)


def test_spans_of_a_mixture_are_those_of_their_source() -> None:
    """Also in later epochs, whose numbers of rows are above the first one's."""
    sources = [rows_of(), rows_of(seed=1)]
    mixed = Loader(Mixture([(rows, 1) for rows in sources]), batch_size=2)
    alone = [
        Loader(rows, batch_size=1, seed=number) for number, rows in enumerate(sources)
    ]
    for _ in range(3 * len(sources[0])):
        batch = next(mixed)
        assert batch["source"].tolist() == [0, 1]
        for number, loader in enumerate(alone):
            right = next(loader)["inputs"][0]
            np.testing.assert_array_equal(batch["inputs"][number], right)


def test_identity_says_what_the_rows_depend_on() -> None:
    names = [
        rows_of(**change).identity()
        for change in ({}, {"seed": 1}, {"mean_span": 2.0}, {"end_id": 1000})
    ]
    assert len({str(name) for name in names}) == 4
    assert names[0] == rows_of().identity()
    assert names[0]["sha256"] == make_tokens().sha256


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"noise_share": 1.0}, "noise_share=1.0 must be above 0 and below 1"),
        ({"mean_span": 0.5}, "mean_span=0.5 must be at least 1 token"),
        ({"input_len": 1}, "input_len=1 must be at least 2: a token of text and a"),
        ({"input_len": 2, "end_id": 1}, "input_len=2 must be at least 3"),
        ({"seed": -1}, "seed=-1 must not be negative"),
        ({"input_len": 2000}, "the corpus has 900 tokens, but a window 2,2"),
        (
            {"vocab_size": 901},
            "and the corpus 900 ids, which reach into them; give a vocab_size of at "
            "least 904",
        ),
        ({"vocab_size": 4}, "vocab_size=4 is too small for 4 sentinels"),
    ],
)
def test_what_is_out_of_range_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rows_of(**given)


def test_a_length_that_no_window_gives_is_named() -> None:
    how = {"noise_share": 0.8, "mean_span": 1.0}
    assert span_lengths(8, **how).inputs == 8
    message = "give inputs of 6 and 8 tokens, but not of input_len=7; give one of those"
    with pytest.raises(ValueError, match=message):
        span_lengths(7, **how)


def test_text_that_can_not_be_cut_is_refused() -> None:
    masked = make_tokens(loss_mask=np.ones(900, np.uint8))
    with pytest.raises(ValueError, match="'counting' has prompts that are not learned"):
        rows_of(masked)
    unknown = Tokens((np.full(900, VOCAB - 1, np.uint16),), ("counting",))
    with pytest.raises(ValueError, match=r"token 0 of the corpus has id 1023, but f"):
        rows_of(unknown).read([0])
