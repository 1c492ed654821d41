"""Is a corpus one sequence, with an identity, documents and what is to be learned?"""

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data import Tokens, read_tokens
from jaxpar.data.tokens import joint_sha256


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_read_equals_slice_of_all_parts(lengths, data):
    if not sum(lengths):
        lengths = [*lengths, 1]
    ids = np.arange(sum(lengths))
    parts = tuple(np.split(ids, np.cumsum(lengths)[:-1]))
    tokens = Tokens(parts, files=("memory",))
    start = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(start, len(ids) + 2))
    np.testing.assert_array_equal(tokens.read(start, stop), ids[start:stop])
    assert tokens.sha256 == hashlib.sha256(ids.tobytes()).hexdigest()


def test_hash_of_more_than_one_chunk_is_that_of_the_whole(monkeypatch):
    monkeypatch.setattr("jaxpar.data.tokens._HASH_CHUNK", 3)
    ids = np.arange(10, dtype=np.uint16)
    tokens = Tokens((ids[:7], ids[7:]), files=("a", "b"))
    assert tokens.sha256 == hashlib.sha256(ids.tobytes()).hexdigest()


def test_tokens_are_frozen():
    tokens = Tokens((np.arange(3),), files=("a",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        tokens.files = ()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((np.zeros((2, 3), int),), r"'x' has shape \(2, 3\).*reshape"),
        ((np.zeros(3),), r"'x' holds float64, but token ids must be integers"),
        ((np.zeros(3, bool),), r"'x' holds bool, but"),
        (
            (np.zeros(3, np.uint16), np.zeros(3, np.uint32)),
            r"parts\[1\] holds uint32 and the part before it uint16",
        ),
        ((), "corpus of 1 files holds no token"),
        ((np.zeros(0, int),), "corpus of 1 files holds no token"),
    ],
)
def test_arrays_that_are_no_corpus_raise(parts, message):
    with pytest.raises(ValueError, match=message):
        Tokens(parts, files=("x",))


IDS = np.arange(6, dtype=np.uint16)


@pytest.mark.parametrize(
    "starts", [[], [1], [0, 0], [0, 3, 2], [0, 6]], ids=lambda starts: str(starts)
)
def test_starts_that_are_none_raise(starts):
    with pytest.raises(ValueError, match="starts must ascend from 0 and stay below"):
        Tokens((IDS,), files=("x",), starts=np.array(starts, np.int64))


@pytest.mark.parametrize("mask", [np.ones(5, np.uint8), np.ones(6, bool)])
def test_loss_mask_that_does_not_fit_raises(mask):
    with pytest.raises(ValueError, match="must be uint8, one for each of the 6 tokens"):
        Tokens((IDS,), files=("x",), loss_mask=mask)


def test_documents_and_what_is_learned_belong_to_tokens():
    mask = np.array([0, 1, 1, 0, 0, 1], np.uint8)
    starts = np.array([0, 3])
    tokens = Tokens((IDS[:4], IDS[4:]), ("a", "b"), starts=starts, loss_mask=mask)
    assert tokens.starts.tolist() == [0, 3]
    assert tokens.loss_mask[1:3].tolist() == [1, 1]


def test_identity_is_of_ids_and_loss_mask():
    of_ids = hashlib.sha256(IDS.tobytes()).hexdigest()
    identities = {of_ids}
    for mask in (np.ones(6, np.uint8), np.zeros(6, np.uint8)):
        identity = Tokens((IDS,), ("x",), loss_mask=mask).sha256
        assert identity == joint_sha256(of_ids, hashlib.sha256(mask).hexdigest())
        identities.add(identity)
    assert len(identities) == 3


def test_vocabulary_of_a_model_must_be_as_large():
    tokens = Tokens((IDS,), ("x.jsonl",), vocab_size=300)
    tokens.require_vocabulary(300)
    with pytest.raises(
        ValueError, match=r"=256 of the model is below the 300 .*x\.jso"
    ):
        tokens.require_vocabulary(256)


def test_vocabulary_of_token_files_is_that_of_their_ids(tmp_path):
    ids = np.array([3, 700, 5], "<u2")
    ids.tofile(tmp_path / "x.bin")
    for tokens in (read_tokens(tmp_path / "x.bin"), Tokens((ids,), ("x.bin",))):
        tokens.require_vocabulary(701)
        with pytest.raises(ValueError, match=r"=700 of the model .* 701 .*x\.bin"):
            tokens.require_vocabulary(700)
        assert tokens.sha256 == hashlib.sha256(ids).hexdigest()
