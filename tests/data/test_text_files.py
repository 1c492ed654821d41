"""Is what is not text refused, and is the same text held out at every start?"""

import hashlib
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from jaxpar.data import ChangedDataError
from jaxpar.data.text_files import read_text, split_text

LINE = "größer, π and so on\n".encode()


def named(folder: Path, **contents: bytes) -> list[tuple[str, Path]]:
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [(name, folder / name) for name in contents]


def test_each_file_is_a_document(tmp_path):
    contents = {"a": b"one ", "b": b"", "c": "drei π".encode()}
    tokens = read_text(named(tmp_path, **contents))
    joined = b"".join(contents.values())
    assert bytes(tokens.array) == joined
    assert tokens.starts.tolist() == [0, 4]
    assert (tokens.vocab_size, tokens.num_bytes) == (256, len(joined))
    assert tokens.sha256 == hashlib.sha256(joined).hexdigest()


@pytest.mark.parametrize(
    ("content", "at", "byte"),
    [
        (LINE * 9 + b"\xff" + LINE, 9 * len(LINE), "ff"),
        ("é".encode("latin-1"), 0, "e9"),
        (LINE + "π".encode()[:1], len(LINE), "cf"),
        (LINE * 300_000 + b"\x80", 300_000 * len(LINE), "80"),
        (np.random.default_rng(0).bytes(5000), None, ".."),
    ],
    ids=["in the middle", "latin-1", "cut off", "after many pieces", "noise"],
)
def test_bytes_that_are_not_utf8_are_named_with_their_place(
    tmp_path, content, at, byte
):
    (file,) = named(tmp_path, a=content)
    place = r"[\d,]+" if at is None else f"{at:,}"
    with pytest.raises(
        ValueError, match=rf"'{file[1]}' is not text: byte {place} is 0x{byte}, which"
    ):
        read_text([file])


def test_character_on_the_edge_of_two_pieces_is_text(tmp_path):
    content = b"x" * ((1 << 22) - 1) + "π".encode() * 3
    assert read_text(named(tmp_path, a=content)).num_bytes == len(content)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PAR1" + b"text", "parquet: name it .parquet"),
        (b"\x1f\x8b\x08", "gzip: unpack it"),
        (b"\xff\xfea\0", "text in UTF-16: convert it"),
    ],
)
def test_known_format_of_another_name_is_answered_with_a_remedy(
    tmp_path, content, said
):
    with pytest.raises(ValueError, match=f"is not text: it begins as {said}"):
        read_text(named(tmp_path, a=content))


def test_text_larger_than_the_memory_is_checked(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        for _ in range(64):
            file.write(LINE * 40_000)
    tracemalloc.start()
    tokens = read_text([("a", tmp_path / "a")])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tokens.num_bytes == 64 * 40_000 * len(LINE) > 5e7
    assert peak < 3e7


def test_text_that_changes_after_it_was_checked_is_refused(tmp_path):
    tokens = read_text(named(tmp_path, a=LINE))
    (tmp_path / "a").write_bytes(LINE[::-1])
    with pytest.raises(ChangedDataError, match="was written since it was opened"):
        tokens.read(0, 1)


def test_end_of_one_file_is_held_out_from_a_line_on(tmp_path):
    content = b"".join(b"line %d\n" % number for number in range(1000))
    train, heldout, how = split_text(named(tmp_path, a=content), 0.05)
    assert bytes(train.array) + bytes(heldout.array) == content
    assert bytes(heldout.array).startswith(b"line 95")
    assert how == f"the last {len(heldout)} bytes, from a new line on"
    for tokens in (train, heldout):
        assert tokens.sha256 == hashlib.sha256(bytes(tokens.array)).hexdigest()


def test_one_long_last_line_is_held_out_whole(tmp_path):
    files = named(tmp_path, a=b"first\n" + b"x" * 4000)
    train, heldout, _ = split_text(files, 0.05)
    assert (bytes(train.array), len(heldout)) == (b"first\n", 4000)


@pytest.mark.parametrize("content", [b"one line", b"one line\n"])
def test_text_without_a_line_to_cut_at_says_to_give_more(tmp_path, content):
    with pytest.raises(
        ValueError, match=r"no line that 5% of it can be cut.*--heldout"
    ):
        split_text(named(tmp_path, a=content), 0.05)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.1])
def test_few_files_of_one_line_are_cut_between_them(tmp_path, share):
    files = named(tmp_path, a=b"of a", b=b"of b")
    train, heldout, how = split_text(files, share)
    assert (bytes(train.array), bytes(heldout.array)) == (b"of a", b"of b")
    assert how == "the last 4 bytes, from a new document on"


def test_files_are_held_out_by_their_content(tmp_path):
    contents = {f"f{i:03}": b"text of file %d\n" % i for i in range(200)}
    train, heldout, how = split_text(named(tmp_path, **contents), 0.05)
    assert 2 <= len(heldout.files) <= 20
    assert how == f"{len(heldout.files)} of 200 files, by a hash of their content"
    assert sorted((*train.files, *heldout.files)) == sorted(contents)
    for tokens in (train, heldout):
        text = b"".join(contents[name] for name in tokens.files)
        assert bytes(tokens.array) == text
        assert tokens.sha256 == hashlib.sha256(text).hexdigest()
        assert len(tokens.starts) == len(tokens.files)

    more = {f"g{i:03}": b"another, %d\n" % i for i in range(100)}
    again, held_again, _ = split_text(named(tmp_path, **contents, **more), 0.05)
    assert set(heldout.files) < set(held_again.files)
    assert set(train.files) < set(again.files)


def test_few_files_are_cut_as_one_text(tmp_path):
    contents = {name: b"%s\n" % name.encode() * 50 for name in ("a", "b", "c")}
    train, heldout, how = split_text(named(tmp_path, **contents), 0.05)
    assert (train.files, heldout.files) == (("a", "b", "c"), ("c",))
    assert bytes(heldout.array) == b"c\n" * 7
    assert re.match("the last 14 bytes", how)
