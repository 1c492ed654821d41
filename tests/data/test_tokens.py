"""Is a corpus one sequence, with an identity, documents and what is to be learned?"""

import dataclasses
import hashlib
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data import ChangedDataError, Tokens, read_tokens
from jaxpar.data.disk_array import DiskArray
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
    Tokens((IDS,), ("x.bin",)).require_vocabulary(2)


def corpus_on_disk(folder, num_ids=1 << 18):
    np.arange(num_ids, dtype="<u2").tofile(folder / "ids.bin")
    return folder / "ids.bin"


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([os.pread(file.fileno(), 1, at)[0] ^ 1]))


def test_hash_and_block_hashes_take_one_read(tmp_path, monkeypatch):
    path, read = corpus_on_disk(tmp_path), []
    each = DiskArray._read
    monkeypatch.setattr(
        DiskArray, "_read", lambda *args: read.append(args[2] - args[1]) or each(*args)
    )
    tokens = read_tokens(path)
    sha256 = tokens.sha256
    kept = tokens.with_hashes(tmp_path / "run")
    assert sum(read) == path.stat().st_size
    assert kept.sha256 == sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_block_hashes_of_the_first_start_are_compared_at_a_later_one(tmp_path):
    path, run = corpus_on_disk(tmp_path), tmp_path / "run"
    first = read_tokens(path).with_hashes(run)
    (file,) = run.iterdir()
    assert file.name == f"blocks-{first.sha256[:16]}.npy"
    second = read_tokens(path)
    assert second.sha256 == first.sha256
    flip(path, 9)  # After the identity was computed, before the block is read.
    for tokens in (first, second, second.with_hashes(run)):
        assert tokens.read(1 << 17, (1 << 17) + 2).tolist() == [0, 1]
        with pytest.raises(ChangedDataError, match="block 0, from byte 0"):
            tokens.read(0, 2)


def test_parts_of_several_files_have_their_own_blocks(tmp_path):
    for name in ("a", "b"):
        np.arange(9, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    tokens = read_tokens(tmp_path).with_hashes(tmp_path / "run")
    flip(tmp_path / "b.bin", 0)
    assert tokens.read(0, 9).tolist() == [*range(9)]
    with pytest.raises(ChangedDataError, match=r"b\.bin"):
        tokens.read(8, 10)


def test_tokens_in_memory_need_no_hashes(tmp_path):
    tokens = Tokens((IDS,), ("x",))
    assert tokens.with_hashes(tmp_path / "run") is tokens
    assert not (tmp_path / "run").exists()
