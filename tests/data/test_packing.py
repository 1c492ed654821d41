import itertools
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxpar.data import (
    Loader,
    Mixture,
    PackedDocuments,
    RowSource,
    Tokens,
    Windows,
    packing,
)

RNG = np.random.default_rng(0)


def make_tokens(sizes: list[int], **given: np.ndarray) -> Tokens:
    ids = 1 + np.arange(sum(sizes), dtype=np.uint16)
    starts = np.cumsum([0, *sizes[:-1]])
    return Tokens((ids,), ("documents",), starts=starts, **given)


def targets_of(batch: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    """(token, next token) of each prediction that weighs."""
    tokens, weighed = batch["tokens"], batch["weights"] > 0
    return list(
        zip(
            tokens[:, :-1][weighed].tolist(),
            tokens[:, 1:][weighed].tolist(),
            strict=True,
        )
    )


@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=30).filter(
        lambda sizes: max(sizes) > 1
    ),
    seq_len=st.integers(1, 12),
)
def test_every_target_is_predicted_once_from_its_own_document(sizes, seq_len):
    documents = PackedDocuments(make_tokens(sizes), seq_len=seq_len)
    batch = documents.read(range(len(documents)))
    ids = 1 + np.arange(sum(sizes))
    of_documents = np.split(ids, np.cumsum(sizes)[:-1])
    wanted = [pair for ids in of_documents for pair in itertools.pairwise(ids.tolist())]
    assert sorted(targets_of(batch)) == wanted

    tokens, segments, positions = (
        batch[name] for name in ("tokens", "segment_ids", "positions")
    )
    assert ((segments == 0) == (tokens == 0)).all()
    for row in range(len(documents)):
        is_padding = segments[row] == 0
        assert not is_padding[: (~is_padding).sum()].any()
        for segment in range(1, segments[row].max() + 1):
            own = segments[row] == segment
            length = int(own.sum())
            assert 2 <= length <= seq_len + 1
            assert positions[row][own].tolist() == list(range(length))
            assert (np.diff(tokens[row][own]) == 1).all()
    assert documents.padding == pytest.approx((tokens == 0).mean())


def test_masked_tokens_weigh_nothing():
    sizes = [5, 9, 2, 7]
    mask = RNG.integers(0, 2, sum(sizes), dtype=np.uint8)
    documents = PackedDocuments(make_tokens(sizes, loss_mask=mask), seq_len=8)
    batch = documents.read(range(len(documents)))
    plain = PackedDocuments(make_tokens(sizes), seq_len=8)
    all_pairs = targets_of(plain.read(range(len(plain))))
    assert sorted(targets_of(batch)) == sorted(
        (one, two) for one, two in all_pairs if mask[two - 1]
    )


@settings(max_examples=50)
@given(data=st.data(), seq_len=st.integers(1, 6), chunk=st.integers(1, 9))
def test_pieces_with_nothing_to_learn_take_no_row(data, seq_len, chunk):
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=9))
    size = sum(sizes)
    bits = st.lists(st.integers(0, 1), min_size=size, max_size=size)
    mask = np.array(data.draw(bits), np.uint8)
    starts = np.cumsum([0, *sizes[:-1]])
    wanted = [(int(p), int(p) + 1) for p in np.flatnonzero(mask) if p not in starts]
    assume(wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_MASK_BYTES", chunk)
        packed = PackedDocuments(make_tokens(sizes, loss_mask=mask), seq_len=seq_len)
    batch = packed.read(range(len(packed)))
    assert sorted(targets_of(batch)) == wanted
    for row in range(len(packed)):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            own = batch["segment_ids"][row, 1:] == segment
            assert batch["weights"][row][own].any()


def test_pieces_left_out_are_counted():
    mask = np.zeros(40, np.uint8)
    mask[-1] = 1
    packed = PackedDocuments(make_tokens([40], loss_mask=mask), seq_len=8)
    assert len(packed) == 1
    assert packed.description.endswith("; 4 pieces with nothing to learn left out")
    assert packed.identity()["pieces_left_out"] == 4
    mask[:] = 0
    with pytest.raises(ValueError, match="tokens: nothing of the corpus is to be lea"):
        PackedDocuments(make_tokens([40], loss_mask=mask), seq_len=8)


def test_rows_have_the_shapes_they_say():
    documents = PackedDocuments(make_tokens([5, 9, 2, 7]), seq_len=8)
    assert isinstance(documents, RowSource)
    loader = Loader(documents, batch_size=2)
    batch = next(loader)
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        name: (x.shape, x.dtype) for name, x in loader.sample_batch.items()
    }
    assert set(batch) == {"tokens", "segment_ids", "positions", "weights"}


def test_padding_is_the_share_of_the_rows_tokens():
    loader = Loader(PackedDocuments(make_tokens([6, 3, 5]), seq_len=8), batch_size=1)
    assert loader.padding == pytest.approx(4 / 18)
    assert loader.source.description == (
        "3 documents packed in 2 rows of seq_len=8, 22.22% padding"
    )


def test_packed_rows_go_on_at_a_row():
    sizes = RNG.integers(2, 40, 60).tolist()

    def make(**given):
        return Loader(PackedDocuments(make_tokens(sizes), seq_len=15), **given)

    def take(loader, count):
        return np.concatenate([next(loader)["tokens"] for _ in range(count)])

    expected = take(make(batch_size=4), 40)
    loader = make(batch_size=4)
    take(loader, 11)
    state = json.loads(json.dumps(loader.get_state()))
    again = make(batch_size=10)
    again.set_state(state, change=True)
    np.testing.assert_array_equal(take(again, 5), expected[44:94])


def test_identity_is_of_the_documents_too():
    first = PackedDocuments(make_tokens([5, 5]), seq_len=8).identity()
    other = PackedDocuments(make_tokens([4, 6]), seq_len=8).identity()
    assert first["sha256"] == other["sha256"]
    assert first != other
    assert first == PackedDocuments(make_tokens([5, 5]), seq_len=8).identity()


def test_windows_and_packed_documents_do_not_mix():
    tokens = make_tokens([5, 9, 2, 7])
    rows = [PackedDocuments(tokens, seq_len=8), Windows(tokens, seq_len=8)]
    with pytest.raises(
        ValueError, match=r"sources\[1\] has rows of .*pack all or none"
    ):
        Mixture([(each, 1) for each in rows])
    Mixture([(rows[0], 1), (rows[0], 2)])


def test_corpus_without_documents_raises():
    tokens = Tokens((np.arange(9),), ("text",))
    with pytest.raises(ValueError, match=r"no document starts, .*Tokens\(starts=...\)"):
        PackedDocuments(tokens, seq_len=4)


def test_documents_without_a_target_raise():
    with pytest.raises(ValueError, match="none of the 3 documents has two tokens"):
        PackedDocuments(make_tokens([1, 1, 1]), seq_len=4)
