"""Is data encoded once, and again when it, or how it is read, has changed?"""

import dataclasses
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxpar.data import encoded_files
from jaxpar.data.documents import Fields
from jaxpar.data.encoded_files import Reading, open_encoded
from tests.data.tokenizers_of_others import byte_level

PLAIN = Reading(None, None, None, Fields(), skip_bad_rows=False)


def rows(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def opened(
    path: Path, reading: Reading = PLAIN, share: float = 0.0, kind: str = "rows"
):
    return open_encoded([(path.name, path)], kind, path, share, reading)


@pytest.fixture
def builds(monkeypatch) -> list[int]:
    """One entry for each time that data is encoded."""
    found, write = [], encoded_files.write_tokens
    monkeypatch.setattr(
        encoded_files, "write_tokens", lambda *args: found.append(1) or write(*args)
    )
    return found


def test_rows_are_encoded_once_beside_the_data(tmp_path, builds):
    path = rows(tmp_path / "a.jsonl", "one", "two")
    train, heldout, how = opened(path)
    assert bytes(train.array) == b"one\0two\0"
    assert (heldout, how) == (None, "")
    assert opened(path)[0].sha256 == train.sha256
    assert len(builds) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", ".jaxpar"}


CHANGES = {
    "tokenizer": {"tokenizer": byte_level("<|endoftext|>")},
    "end": {"eos_token": "\n"},
    "field": {"fields": Fields("body")},
    "cache": {"cache": "other"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_way_to_read_is_another_cache(tmp_path, builds, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "body": "another"}\n')
    first, _, _ = opened(path)
    again, _, _ = opened(path, dataclasses.replace(PLAIN, **CHANGES[change]))
    assert len(builds) == 2
    assert (first.sha256 == again.sha256) == (change == "cache")


def test_another_share_is_another_cache(tmp_path, builds):
    path = rows(tmp_path / "a.jsonl", *map(str, range(100)))
    for share in (0.0, 0.05, 0.2, 0.2):
        opened(path, share=share)
    assert len(builds) == 3


@pytest.mark.parametrize("change", ["content", "time"])
def test_data_that_changed_is_encoded_again(tmp_path, builds, change):
    path = rows(tmp_path / "a.jsonl", "one")
    opened(path)
    if change == "content":
        rows(path, "one", "two")
    else:
        os.utime(path, ns=(1, 1))
    opened(path)
    assert len(builds) == 2


def test_data_that_changes_while_it_is_encoded_is_refused(tmp_path, monkeypatch):
    path = rows(tmp_path / "a.jsonl", "one")
    write = encoded_files.write_tokens

    def slow(*args):
        index = write(*args)
        rows(path, "one", "two")
        return index

    monkeypatch.setattr(encoded_files, "write_tokens", slow)
    with pytest.raises(
        ValueError, match=r"a\.jsonl' or .* was written while it was rea"
    ):
        opened(path)
    monkeypatch.undo()
    assert bytes(opened(path)[0].array) == b"one\0two\0"


def test_text_by_a_tokenizer_is_a_document_a_file(tmp_path):
    tokenizer = byte_level("<|endoftext|>")
    (tmp_path / "a.txt").write_text("größer, π and so on\n" * 20_000)
    reading = dataclasses.replace(PLAIN, tokenizer=tokenizer)
    train, _, _ = opened(tmp_path / "a.txt", reading, kind="text")
    ids = train.array.tolist()
    assert ids[-1] == train.end_id == tokenizer.token_to_id("<|endoftext|>")
    text = tokenizer.decode(ids[:-1], skip_special_tokens=False)
    assert text == (tmp_path / "a.txt").read_text()
    assert train.starts.tolist() == [0]
    assert train.vocab_size == tokenizer.get_vocab_size()


def test_text_by_a_tokenizer_is_split_as_text(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(1000)))
    reading = dataclasses.replace(PLAIN, tokenizer=byte_level("</s>"))
    _, heldout, how = opened(tmp_path / "a.txt", reading, 0.05, "text")
    assert how.startswith("the last ")
    assert reading.tokenizer.decode(heldout.array.tolist()).startswith("line 95")


def test_documents_are_held_out_by_their_text(tmp_path):
    path = rows(tmp_path / "a.jsonl", *(f"document {i}" for i in range(400)))
    train, heldout, how = opened(path, share=0.05)
    assert how == f"{len(heldout.starts)} of 400 documents, by a hash of their content"
    assert len(train.starts) + len(heldout.starts) == 400
    assert 5 < len(heldout.starts) < 40


def test_last_of_few_documents_are_held_out(tmp_path):
    path = rows(tmp_path / "a.jsonl", "a", "b", "c")
    train, heldout, how = opened(path, share=0.05)
    assert (bytes(train.array), bytes(heldout.array)) == (b"a\0b\0", b"c\0")
    assert how == "the last 1 of 3 documents"


def test_share_that_would_take_all_leaves_one_document(tmp_path):
    path = rows(tmp_path / "a.jsonl", "a", "b")
    train, heldout, how = opened(path, share=0.99)
    assert (bytes(train.array), bytes(heldout.array)) == (b"a\0", b"b\0")
    assert how == "the last 1 of 2 documents"


def test_share_of_which_nothing_is_left_is_refused(tmp_path):
    # Its line breaks, with which documents end, are no tokens, like other spaces.
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = rows(tmp_path / "a.jsonl", "a", " ")
    with pytest.raises(ValueError, match=r"heldout: .* gives no tokens"):
        opened(path, dataclasses.replace(PLAIN, tokenizer=tokenizer), share=0.05)


def test_one_document_is_not_split(tmp_path):
    with pytest.raises(ValueError, match=r"'a\.jsonl' has one document, of which none"):
        opened(rows(tmp_path / "a.jsonl", "a"), share=0.05)


def test_rows_without_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jsonl: there is no row with text"):
        opened(rows(tmp_path / "a.jsonl", "", ""))


def test_skipped_rows_are_said_at_each_start_and_stop_one_that_does_not_skip(
    tmp_path, capsys
):
    path = rows(tmp_path / "a.jsonl", "one")
    path.write_text(path.read_text() + "{}\n")
    skips = dataclasses.replace(PLAIN, skip_bad_rows=True)
    for _ in range(2):
        opened(path, skips)
        said = capsys.readouterr().out
        assert said.startswith(
            "bad rows 1 of 2 rows skipped; the first: a.jsonl, line 2"
        )
    (index,) = tmp_path.glob(".jaxpar/*/index.json")
    counts = json.loads(index.read_text())["built"]["rows"]
    assert (counts["bad"], counts["rows"]) == (1, 2)
    with pytest.raises(
        ValueError, match=r"^a\.jsonl, line 2: has the fields none, not"
    ):
        opened(path)


@pytest.mark.parametrize(("eos_token", "text"), [(None, "a\0b"), ("\n", "a\nb")])
def test_text_of_rows_with_the_byte_of_the_end_is_a_bad_row(tmp_path, eos_token, text):
    path = rows(tmp_path / "a.jsonl", "one", text, "two")
    reading = dataclasses.replace(PLAIN, eos_token=eos_token)
    with pytest.raises(ValueError, match=r"line 2: has .* in its text, which ends d"):
        opened(path, reading)
    train, _, _ = opened(path, dataclasses.replace(reading, skip_bad_rows=True))
    assert len(train.starts) == 2
    tokenizer = byte_level("</s>")
    train, _, _ = opened(path, dataclasses.replace(PLAIN, tokenizer=tokenizer))
    assert len(train.starts) == 3, "a tokenizer's end is no byte"


def test_instructions_are_learned_where_they_answer(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1+1=", "completion": "2"}\n' * 3)
    train, _, _ = opened(path)
    assert bytes(train.array) == b"1+1=\n2\0" * 3
    assert train.starts.tolist() == [0, 7, 14]
    np.testing.assert_array_equal(train.loss_mask[:], [0, 0, 0, 0, 0, 1, 1] * 3)


def test_corpus_larger_than_the_memory_is_encoded(tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"text": "A little story. " * 4000}) + "\n"
    with path.open("w") as file:
        file.writelines(line for _ in range(500))
    tracemalloc.start()
    train, _, _ = opened(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(train) > path.stat().st_size * 0.99 > 3e7
    assert peak < 1.5e7
