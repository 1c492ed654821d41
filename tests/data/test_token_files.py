"""Is what was encoded opened again as it was, and a damaged file refused?"""

import hashlib
import os
import tracemalloc

import numpy as np
import pytest

from jaxpar.data import ChangedDataError
from jaxpar.data.documents import TextSpan
from jaxpar.data.encoding import Document, bytes_encoder, encode_documents
from jaxpar.data.token_files import open_split, write_tokens
from jaxpar.data.tokens import joint_sha256

ENCODER = bytes_encoder()


def text(content: str, *, held: bool = False) -> Document:
    return Document([TextSpan(content, ends=True)], held)


def pair(prompt: str, answer: str) -> Document:
    return Document([TextSpan(prompt, is_learned=False), TextSpan(answer, ends=True)])


def write(folder, documents) -> dict:
    return write_tokens(folder, encode_documents(documents, ENCODER), ENCODER)


def test_splits_are_opened_as_they_were_written(tmp_path):
    index = write(tmp_path, [text("one"), text("held", held=True), text("two")])
    train, heldout = (
        open_split(tmp_path, index, s, ("a",)) for s in ("train", "heldout")
    )
    assert bytes(train.array) == b"one\0two\0"
    assert bytes(heldout.array) == b"held\0"
    assert train.starts.tolist() == [0, 4]
    assert (train.loss_mask, train.end_id, train.vocab_size) == (None, 0, 256)
    assert (train.num_bytes, train.files) == (6, ("a",))
    assert train.sha256 == hashlib.sha256(b"one\0two\0").hexdigest()


def test_mask_begins_where_something_is_not_learned(tmp_path):
    documents = [text("x" * 2_000_000), pair("ask", "answer")]
    index = write(tmp_path, documents)
    tokens = open_split(tmp_path, index, "train", ("a",))
    assert len(tokens.loss_mask) == len(tokens)
    expected = np.ones(len(tokens), np.uint8)
    expected[2_000_001:2_000_004] = 0
    np.testing.assert_array_equal(tokens.loss_mask[:], expected)
    hashes = (
        hashlib.sha256(part[:]).hexdigest()
        for part in (*tokens.parts, tokens.loss_mask)
    )
    assert tokens.sha256 == joint_sha256(*hashes)


def test_split_without_documents_is_none(tmp_path):
    index = write(tmp_path, [text("held", held=True)])
    assert open_split(tmp_path, index, "train", ("a",)) is None
    assert not [*tmp_path.glob("train*")]


@pytest.mark.parametrize("name", ["train.ids", "train.starts", "train.mask"])
def test_file_of_another_size_is_refused(tmp_path, name):
    index = write(tmp_path, [pair("ask", "answer")])
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        ValueError, match=rf"{name}' has 0 bytes, but .* Delete '.*written"
    ):
        open_split(tmp_path, index, "train", ("a",))


@pytest.mark.parametrize("name", ["ids", "mask"])
def test_changed_file_is_found(tmp_path, name):
    index = write(tmp_path, [pair("ask", "answer")])
    tokens = open_split(tmp_path, index, "train", ("a",))
    path = tmp_path / f"train.{name}"
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(0, 5))
    with pytest.raises(
        ChangedDataError, match=rf"train\.{name}' was written .* Delete '.*again"
    ):
        tokens.read(0, 1) if name == "ids" else tokens.loss_mask[0:1]


def test_corpus_larger_than_the_memory_is_written(tmp_path):
    tracemalloc.start()
    index = write(tmp_path, (text("word " * 8000) for _ in range(1000)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index["splits"]["train"]["tokens"] == 1000 * 40_001
    assert peak < 2e7
