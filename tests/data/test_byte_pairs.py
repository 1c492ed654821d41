"""Are byte pairs learned from any text, and does every text come back as it was?"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data import Tokens, byte_pairs, read_tokens, stdlib_source
from jaxpar.data.byte_pairs import (
    END,
    encode,
    open_tokenizer,
    tokenize,
    train_tokenizer,
)

WORDS = "def square(x):\n    return x * x  # größer, π\n"


def text(content: str | bytes) -> Tokens:
    raw = content.encode() if isinstance(content, str) else content
    return Tokens((np.frombuffer(raw, np.uint8),), ("text",), 256, len(raw))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(text(WORDS * 50), 300)


@given(st.text(min_size=1))
def test_text_comes_back(tokenizer, content):
    ids = encode(tokenizer, text(content)).array
    assert tokenizer.decode(ids.tolist()) == content


def test_long_text_is_cut_at_newlines_and_comes_back(tokenizer):
    content = WORDS * 20_000
    encoded = encode(tokenizer, text(content))
    assert tokenizer.decode(encoded.array.tolist()) == content
    lines = encode(tokenizer, text(WORDS)).array
    # Chunks end where no token goes on.
    np.testing.assert_array_equal(encoded.array, np.tile(lines, 20_000))


def test_line_longer_than_a_chunk_comes_back(tokenizer):
    content = "x" * 300_000
    ids = encode(tokenizer, text(content)).array
    assert tokenizer.decode(ids.tolist()) == content


def test_source_of_the_standard_library_takes_a_third_of_its_bytes():
    train, heldout = stdlib_source()
    tokenizer = train_tokenizer(text(train.read(0, 2_000_000).tobytes()), 2048)
    encoded = encode(tokenizer, heldout)
    assert encoded.vocab_size == tokenizer.get_vocab_size() == 2048
    assert (encoded.dtype, encoded.files) == (np.uint16, heldout.files)
    assert len(heldout) / len(encoded) > 2.5


def test_training_again_gives_the_same_vocabulary(tokenizer):
    again = train_tokenizer(text(WORDS * 50), 300)
    assert again.to_str() == tokenizer.to_str()


def test_tokenizer_is_written_once_and_then_read(tmp_path):
    path = tmp_path / "run" / "tokenizer.json"
    first = open_tokenizer(path, text(WORDS * 50), 300)
    second = open_tokenizer(path, text("other text"), 300)
    assert second.to_str() == first.to_str()
    assert [file.name for file in path.parent.iterdir()] == ["tokenizer.json"]


def test_only_text_for_a_model_of_more_than_bytes_is_tokenized(tmp_path):
    path = tmp_path / "tokenizer.json"
    ids = Tokens((np.arange(5, dtype=np.uint16),), files=("a.bin",))
    words = text(WORDS * 50)
    assert tokenize(ids, ids, 300, tmp_path) == (ids, ids, None)
    assert tokenize(words, words, 256, tmp_path) == (words, words, None)
    assert not path.exists()
    train, heldout, tokenizer = tokenize(words, text(WORDS), 300, tmp_path)
    assert tokenizer is not None
    assert tokenizer.decode(heldout.array.tolist()) == WORDS
    num_bytes = len(WORDS.encode())
    assert (heldout.num_bytes, train.num_bytes) == (num_bytes, 50 * num_bytes)


def test_bytes_that_are_no_text_are_replaced(tokenizer):
    ids = encode(tokenizer, text(b"\xff\xfe ok")).array
    assert tokenizer.decode(ids.tolist()) == "\ufffd\ufffd ok"


def test_token_files_and_small_vocabularies_are_refused(tokenizer):
    ids = Tokens((np.arange(5, dtype=np.uint16),), files=("a.bin",))
    for use in (lambda: train_tokenizer(ids, 300), lambda: encode(tokenizer, ids)):
        with pytest.raises(ValueError, match=r"'a\.bin' holds uint16 ids, not bytes"):
            use()
    with pytest.raises(ValueError, match="vocab_size=255 must be at least 256"):
        train_tokenizer(text(WORDS), 255)


def test_text_on_disk_is_encoded_once_beside_it(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(WORDS * 50)
    on_disk = read_tokens(tmp_path / "a.txt")
    encoded = encode(tokenizer, on_disk)
    in_memory = encode(tokenizer, text(WORDS * 50))
    np.testing.assert_array_equal(encoded.array, in_memory.array)
    assert encoded.num_bytes == in_memory.num_bytes == len(on_disk)
    monkeypatch.setattr(byte_pairs, "write_tokens", None)
    assert encode(tokenizer, on_disk).sha256 == encoded.sha256
    assert len([*tmp_path.glob(".jaxpar/*/index.json")]) == 1


def test_documents_keep_their_starts_and_may_be_ended(tokenizer):
    source = Tokens(
        (np.frombuffer(b"one two", np.uint8),), ("a",), 256, 7, starts=np.array([0, 3])
    )
    plain, ended = encode(tokenizer, source), encode(tokenizer, source, ends=True)
    assert tokenizer.decode(plain.array.tolist()) == "one two"
    assert tokenizer.decode(ended.array.tolist()) == "one\n two\n"
    for tokens in (plain, ended):
        second = tokens.array[tokens.starts[1] :].tolist()
        assert tokenizer.decode(second).strip() == "two"


def test_trained_vocabulary_has_an_end_where_documents_have():
    source = Tokens(
        (np.frombuffer(b"one two\0" * 50, np.uint8),),
        ("a",),
        256,
        350,
        starts=np.arange(0, 400, 8),
        end_id=0,
    )
    trained = train_tokenizer(source, 300)
    encoded = encode(trained, source)
    assert trained.id_to_token(encoded.end_id) == END
    assert (encoded.array == encoded.end_id).sum() == 50
    assert encoded.starts.tolist() == [*range(0, len(encoded), len(encoded) // 50)]


def test_vocabulary_is_learnt_from_the_beginning_of_a_large_text(monkeypatch):
    # Of 128 KiB chunks, the first is enough.
    monkeypatch.setattr(byte_pairs, "_TRAINED_ON", 1)
    trained = train_tokenizer(text("early words\n" * 20_000 + "latest " * 90_000), 290)
    assert trained.token_to_id("early") is not None
    assert trained.token_to_id("Ġlatest") is None
