"""Do data in any format come as two splits, and go into a run as its model needs?"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import jaxpar.config
from jaxpar.data import (
    ChangedDataError,
    DataConfig,
    Loader,
    PackedDocuments,
    Tokens,
    Windows,
    corpus,
    open_corpus,
    stdlib_source,
)
from tests.data.tokenizers_of_others import byte_level, save


def text_of(tokens) -> str:
    return bytes(tokens.array).decode()


def test_without_files_the_standard_library_is_opened():
    train, heldout, tokenizer = open_corpus()
    assert [train.sha256, heldout.sha256] == [t.sha256 for t in stdlib_source()]
    assert tokenizer is None


def test_each_split_may_have_its_files(tmp_path):
    for name in ("train", "held"):
        (tmp_path / f"{name}.txt").write_text(f"{name} text")
    train, held, _ = open_corpus(
        [tmp_path / "train.txt"], heldout=[tmp_path / "held.txt"]
    )
    assert (text_of(train), text_of(held)) == ("train text", "held text")


def test_held_out_data_alone_is_refused():
    with pytest.raises(
        ValueError, match=r"heldout=\('a\.txt',\) is given without data"
    ):
        open_corpus(heldout=["a.txt"])


def kinds(folder: Path) -> dict[str, Path]:
    (folder / "a.txt").write_text("a line\n" * 99)
    np.arange(99, dtype="<u2").tofile(folder / "a.bin")
    return {"text": folder / "a.txt", "ids": folder / "a.bin", "rows": chat(folder)}


@pytest.mark.parametrize("pair", ["text rows", "rows text", "ids text"])
def test_splits_of_two_kinds_are_refused(tmp_path, pair):
    train, heldout = (kinds(tmp_path)[kind] for kind in pair.split())
    with pytest.raises(ValueError, match=r"^heldout: '.*' is .*, but '.*' of the data"):
        open_corpus([train], heldout=[heldout])


def test_token_files_of_both_suffixes_are_one_kind(tmp_path):
    np.save(tmp_path / "b.npy", np.arange(9))
    heldout = open_corpus([kinds(tmp_path)["ids"]], heldout=[tmp_path / "b.npy"])[1]
    assert heldout.array.tolist() == [*range(9)]


@pytest.mark.parametrize("fault", ["missing", "empty", "bad"])
def test_errors_of_held_out_data_say_so(tmp_path, fault):
    (tmp_path / "a.txt").write_text("a line\n" * 99)
    held = tmp_path / "held.txt"
    if fault != "missing":
        held.write_bytes(b"\xff" if fault == "bad" else b"")
    with pytest.raises((ValueError, FileNotFoundError), match=r"^heldout: ") as raised:
        open_corpus([tmp_path / "a.txt"], heldout=[held])
    assert "paths" not in str(raised.value)


def test_batch_of_more_rows_than_held_out_data_has_says_so(tmp_path):
    opened = open_corpus([chat(tmp_path)])
    for rows in (PackedDocuments, Windows):
        Loader(rows(opened.train, seq_len=8), batch_size=16)
        with pytest.raises(ValueError, match=r"it has \d+ .* \(held out\).*, fewer th"):
            Loader(rows(opened.heldout, seq_len=64), batch_size=16)


FORMATS = {
    "pandas.jsonl": {},
    "pandas.parquet": {"text": "story", "bad_rows": "skip"},
    "datasets.jsonl": {},
    "datasets.parquet": {"prompt": "prompt", "answer": "completion"},
    "stories": {},
    "chats": {},
    "both/train": {},
}


@pytest.mark.parametrize("name", FORMATS)
def test_files_of_others_are_opened_and_split(foreign, capsys, name):
    train, heldout, _ = open_corpus([foreign / name], **FORMATS[name])
    assert train.end_id == heldout.end_id == 0
    assert bytes(train.array).endswith(b"\0")
    assert "held out" in capsys.readouterr().out
    has_answers = name in ("datasets.jsonl", "datasets.parquet", "chats")
    assert (train.loss_mask is not None) == has_answers


def test_what_is_learned_of_a_saved_chat_is_its_answers(foreign):
    train, _, _ = open_corpus([foreign / "chats"])
    learned = train.array[train.loss_mask[:] == 1]
    assert bytes(learned) == b"1\x003\x004\x00"
    start = bytes(train.array[: train.starts[1]])
    assert start == b"<|user|>\n0+1?\n<|assistant|>\n1\0"


def test_tokenizer_of_a_model_encodes_any_format(foreign, tmp_path):
    tokenizer = byte_level("<|endoftext|>", "<|im_end|>")
    path = save(tokenizer, tmp_path / "model", eos_token="<|im_end|>")
    for name in ("stories", "datasets.jsonl"):
        train, _, found = open_corpus([foreign / name], tokenizer=path)
        assert found.to_str() == tokenizer.to_str()
        assert train.end_id == 1
        assert train.vocab_size == tokenizer.get_vocab_size()
    story = train.array[: train.starts[1]].tolist()
    text = tokenizer.decode(story, skip_special_tokens=False)
    assert text == "0+1=\n1<|im_end|>"


@pytest.fixture
def two_files(monkeypatch):
    """A standard library of two files."""
    text = np.frombuffer(b"one file and another", np.uint8)
    source = Tokens((text,), ("a", "b"), 256, starts=np.array([0, 9]))
    monkeypatch.setattr(corpus, "stdlib_source", lambda: (source, source))


@pytest.mark.usefixtures("two_files")
def test_tokenizer_encodes_the_standard_library_too(tmp_path):
    train, _, tokenizer = open_corpus(tokenizer=save(byte_level("</s>"), tmp_path))
    said = tokenizer.decode(train.array.tolist(), skip_special_tokens=False)
    assert said == "one file </s>and another</s>"
    assert len(train.starts) == 2


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_end_of_token_files_is_held_out(tmp_path, suffix, capsys):
    ids = np.arange(200, dtype="<u2")
    path = tmp_path / f"ids{suffix}"
    ids.tofile(path) if suffix == ".bin" else np.save(path, ids)
    train, heldout, _ = open_corpus([path])
    assert (len(train), heldout.array.tolist()) == (190, [*range(190, 200)])
    assert capsys.readouterr().out == "held out the last 10 tokens\n"


@pytest.mark.parametrize("name", ["noise.txt", "noise.parquet", "noise.jsonl"])
def test_noise_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(np.random.default_rng(0).bytes(5000))
    with pytest.raises(ValueError, match=rf"{name}.*(not UTF-8|can't be read)"):
        open_corpus([tmp_path / name])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bad_rows": "drop"}, "bad_rows='drop' must be one of"),
        ({"heldout_share": 1.0}, "heldout_share=1.0 must be above 0"),
        ({"prompt": "q"}, "give the fields of both"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        open_corpus(**options)


def chat(folder: Path) -> Path:
    path = folder / "a.jsonl"
    rows = [
        {"prompt": f"What follows {i}?", "completion": str(i + 1)} for i in range(99)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_become_byte_pairs_of_a_model_that_has_them(tmp_path):
    opened = open_corpus([chat(tmp_path)])
    train, heldout, tokenizer = opened.for_run(tmp_path / "run", 300)
    assert (tmp_path / "run" / "tokenizer.json").exists()
    assert train.vocab_size == tokenizer.get_vocab_size() <= 300
    assert tokenizer.id_to_token(train.end_id) == "<|endoftext|>"
    assert len(train.starts) == len(opened.train.starts)
    assert train.num_bytes == opened.train.num_bytes
    for tokens, source in ((train, opened.train), (heldout, opened.heldout)):
        learned = tokens.array[tokens.loss_mask[:] == 1].tolist()
        answers = tokenizer.decode(learned, skip_special_tokens=False)
        expected = bytes(source.array[source.loss_mask[:] == 1]).decode()
        assert answers.replace("<|endoftext|>", "\0") == expected


def test_rows_stay_bytes_for_a_model_of_bytes(tmp_path):
    opened = open_corpus([chat(tmp_path)])
    for size, byte_pairs in ((256, True), (300, False)):
        train, _, tokenizer = opened.for_run(
            tmp_path / "run", size, byte_pairs=byte_pairs
        )
        assert tokenizer is None
        assert train.sha256 == opened.sha256


def test_tokens_beyond_the_model_are_refused(tmp_path):
    path = save(byte_level("</s>"), tmp_path / "model")
    opened = open_corpus([chat(tmp_path)], tokenizer=path)
    with pytest.raises(
        ValueError, match=r"=256 of the model is below the 3\d\d of the"
    ):
        opened.for_run(tmp_path / "run", 256)
    assert opened.for_run(tmp_path / "run", 400).tokenizer is opened.tokenizer


@pytest.mark.parametrize("wrong", ["train", "heldout"])
def test_ids_beyond_the_model_are_refused_in_both_splits(tmp_path, wrong):
    for name in ("train", "heldout"):
        ids = np.full(50, 300 if name == wrong else 7, "<u2")
        ids.tofile(tmp_path / f"{name}.bin")
    opened = open_corpus([tmp_path / "train.bin"], heldout=[tmp_path / "heldout.bin"])
    opened.for_run(tmp_path / "run", 301)
    with pytest.raises(ValueError, match=rf"below the 301 of the .*{wrong}\.bin"):
        opened.for_run(tmp_path / "run", 300)


def test_tokenizer_of_the_run_is_checked_too(tmp_path):
    opened = open_corpus([chat(tmp_path)])
    opened.for_run(tmp_path / "run", 300)
    with pytest.raises(ValueError, match=r"=260 of the model is below the \d+ of"):
        opened.for_run(tmp_path / "run", 260)


@pytest.mark.parametrize("pack", [False, True])
def test_rows_that_do_not_fit_the_data_are_refused_at_once(tmp_path, pack):
    np.arange(99, dtype="<u2").tofile(tmp_path / "a.bin")
    path = tmp_path / "a.bin" if pack else chat(tmp_path)
    said = "no document starts, which packing needs" if pack else "give --pack"
    config = DataConfig(data=(str(path),))
    config.open_data()
    config.open_data(pack=not pack)
    with pytest.raises(ValueError, match=said):
        config.open_data(pack=pack)


@pytest.mark.usefixtures("two_files")
def test_eos_token_ends_the_documents_of_the_standard_library(tmp_path):
    path = save(byte_level("</s>", "<x>"), tmp_path)
    train, heldout, tokenizer = open_corpus(tokenizer=path, eos_token="<x>")
    end = tokenizer.token_to_id("<x>")
    assert train.end_id == heldout.end_id == end
    assert len(train.starts) == 2
    assert (train.array[train.starts[1:] - 1] == end).all()


@pytest.mark.parametrize("kind", ["standard library", "text", "ids"])
def test_eos_token_that_would_not_be_used_is_refused(tmp_path, kind):
    (tmp_path / "a.txt").write_text("a line\n" * 99)
    np.arange(99, dtype="<u2").tofile(tmp_path / "a.bin")
    files = {"standard library": (), "text": ["a.txt"], "ids": ["a.bin"]}
    with pytest.raises(ValueError, match=r"eos_token='\\n': no end is written"):
        open_corpus([tmp_path / name for name in files[kind]], eos_token="\n")


def test_data_that_changes_under_a_run_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a line\n" * 99)
    opened = open_corpus([tmp_path / "a.txt"])
    train, heldout, _ = opened.for_run(tmp_path / "run", 256)
    (tmp_path / "a.txt").write_text("A line\n" * 99)
    os.utime(tmp_path / "a.txt", ns=(0, 5))
    for tokens in (train, heldout):
        with pytest.raises(ChangedDataError, match=r"a\.txt' was written since it was"):
            tokens.read(0, 1)


def test_flags_have_no_prefix(tmp_path):
    path = chat(tmp_path)
    flags = ["--data", str(path), "--text-field", "prompt", "--bad-rows", "skip"]
    config = jaxpar.config.parse(DataConfig, None, flags)
    train, _, _ = config.open_data()
    assert bytes(train.array).startswith(b"What follows 0?\0")
    assert train.loss_mask is None
