"""Are words hidden in the published shares, and the same ones when a run resumes?"""

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest

from jaxpar.data import Loader, MaskedRows, Mixture, PackedDocuments, Tokens, Windows
from jaxpar.data.masking import NO_LABEL

WORDS, MASK = 200, 250


def windows(length: int = 41, num: int = 6) -> Windows:
    ids = np.random.default_rng(0).integers(0, WORDS, num * (length - 1) + 1)
    tokens = Tokens((ids.astype(np.uint8),), files=("random",))
    return Windows(tokens, seq_len=length - 1)


def masked(source: Any = None, **how: Any) -> MaskedRows:
    source = windows() if source is None else source
    return MaskedRows(source, **{"mask_id": MASK, "num_words": WORDS, **how})


def take(loader: Loader, count: int) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(loader, count))


def assert_same(batches: Any, others: Any) -> None:
    for one, other in zip(batches, others, strict=True):
        assert one.keys() == other.keys()
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name])


def test_labels_are_what_was_there():
    rows = masked()
    found, plain = rows.read(range(6)), windows().read(range(6))
    chosen = found["labels"] != NO_LABEL
    np.testing.assert_array_equal(found["labels"][chosen], plain["tokens"][chosen])
    np.testing.assert_array_equal(found["tokens"][~chosen], plain["tokens"][~chosen])
    assert chosen.sum(1).tolist() == [6] * 6, "15 % of 41 words, rounded"
    assert {name: x.shape for name, x in rows.shapes.items()} == {
        name: x.shape[1:] for name, x in found.items()
    }


def test_chosen_words_become_masks_random_words_and_themselves():
    rows = masked(windows(length=4001), share=0.5)
    found = rows.read(range(6))
    chosen = found["labels"] != NO_LABEL
    now, was = found["tokens"][chosen], found["labels"][chosen]
    shares = [np.mean(now == MASK), np.mean(now == was)]
    # 12,000 words: one standard deviation is 0.004.
    assert shares == pytest.approx([0.8, 0.1 + 0.1 / WORDS], abs=0.012)
    others = now[(now != MASK) & (now != was)]
    assert others.max() < WORDS
    assert len(np.unique(others)) > WORDS / 2


def test_masks_are_those_that_saved_states_mean():
    # Other random numbers would go on with other masks, and not say so.
    (row,) = masked().read([13])["labels"]
    assert np.flatnonzero(row >= 0).tolist() == [10, 13, 16, 26, 29, 40]


def test_epochs_differ_and_evaluations_do_not():
    loader = Loader(masked(), batch_size=6, shuffle=False, repeat=True)
    first, second = take(loader, 2)
    assert not np.array_equal(first["labels"], second["labels"])
    held = Loader(masked(), batch_size=3, repeat=False)
    assert_same(list(held), list(held))
    assert not np.array_equal(
        next(Loader(masked(seed=1), batch_size=6, shuffle=False))["labels"],
        first["labels"],
    )


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_that_resumes_sees_the_same(count: int):
    def make(index: int, of: int, size: int = 4) -> Loader:
        how = {"process_index": index, "process_count": of, "seed": 3}
        return Loader(masked(), batch_size=size, **how)

    whole = take(make(0, 1), 7)
    first = make(0, 1)
    take(first, 4)  # Past the end of an epoch.
    resumed = [make(index, count) for index in range(count)]
    for loader in resumed:
        loader.set_state(first.get_state())
    shards = [take(loader, 3) for loader in resumed]
    joined = [
        {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}
        for parts in zip(*shards, strict=True)
    ]
    assert_same(joined, whole[4:])
    other = make(0, 1, size=2)
    other.set_state(first.get_state(), change=True)
    assert_same([other.__next__()], [{k: x[:2] for k, x in whole[4].items()}])


def test_a_state_of_other_masks_is_refused():
    state = Loader(masked(), batch_size=2).get_state()
    with pytest.raises(ValueError, match=r"mask_share was 0\.15 and is 0\.3"):
        Loader(masked(share=0.3), batch_size=2).set_state(state)


def test_padding_and_words_that_are_named_are_never_chosen():
    ids = np.tile(np.arange(10, dtype=np.uint8), 6)
    starts = np.arange(0, 60, 10)
    tokens = Tokens((ids,), files=("documents",), starts=starts)
    rows = masked(PackedDocuments(tokens, seq_len=23), share=0.9, never=[0, 4])
    batch = rows.read(range(len(rows)))
    assert batch.keys() == {"tokens", "labels", "segment_ids", "positions"}
    chosen = batch["labels"][batch["labels"] != NO_LABEL]
    assert {*chosen.tolist()} == {*range(10)} - {0, 4}
    assert (batch["labels"][batch["segment_ids"] == 0] == NO_LABEL).all()
    assert rows.padding > 0


def test_a_row_without_words_is_left_as_it_is():
    tokens = Tokens((np.zeros(9, np.uint8),), files=("zeros",))
    batch = masked(Windows(tokens, seq_len=4), never=[0]).read([0, 1])
    assert (batch["labels"] == NO_LABEL).all()
    assert not batch["tokens"].any()
    one = masked(Windows(tokens, seq_len=4)).read([0])
    assert (one["labels"] >= 0).sum() == 1, "at least one"


def test_mixtures_are_masked_and_not_mixed_from_masks():
    pair = [(windows(), 1), (windows(), 1)]
    (batch,) = take(Loader(masked(Mixture(pair)), batch_size=4), 1)
    assert batch["source"].tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match=r"sources\[1\] is MaskedRows, .* mask the Mi"):
        Mixture([(windows(), 1), (masked(), 1)])


class Pictures:
    shapes: ClassVar[dict[str, Any]] = {"image": None}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"share": 0.0}, r"share=0\.0 must be above 0 and below 1"),
        ({"share": 1.0}, r"share=1\.0 must be above 0 and below 1"),
        ({"mask_id": -1}, r"mask_id=-1 must not be negative"),
        ({"seed": -1}, r"seed=-1 must not be negative"),
        ({"num_words": 0}, r"num_words=0 must be at least 1"),
        ({"source": Pictures()}, r"its rows have image, but masks are of 'tokens'"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_what_does_not_fit_is_refused(how: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        masked(**how)
