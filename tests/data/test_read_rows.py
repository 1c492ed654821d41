"""Are rows of each format read in order, with their place, in bounded memory?"""

import gzip
import importlib
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpar.data.read_rows import Row, read_rows
from tests.memory import most_bytes


def rows(path: Path, *columns: str) -> list[Row]:
    done = []
    chosen = list(columns)
    found = [*read_rows(path, path.name, lambda names: chosen or names, done.append)]
    assert sum(done) == pytest.approx(path.stat().st_size, rel=1e-3, abs=2)
    return found


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"\n".join(lines))
    return path


def test_lines_by_pandas_and_datasets_are_read(foreign):
    assert [row.value for row in rows(foreign / "pandas.jsonl")] == [
        {"text": "One line.\nAnother.", "id": 1},
        {"text": "größer, π", "id": 2},
    ]
    (first, *_, last) = rows(foreign / "datasets.jsonl")
    assert first.value == {"prompt": "0+1=", "completion": "1"}
    assert (last.where, last.value["prompt"]) == ("datasets.jsonl, line 6", "5+1=")


def test_parquet_by_pandas_and_datasets_is_read_by_column(foreign):
    assert [row.value for row in rows(foreign / "pandas.parquet", "story")] == [
        {"story": "One."},
        {"story": "Two, größer."},
        {"story": ""},
        {"story": None},
    ]
    last = rows(foreign / "datasets.parquet")[-1]
    assert last.where == "datasets.parquet, row 5 (from 0)"
    assert last.value == {"prompt": "5+1=", "completion": "6"}


def test_saved_dataset_is_read(foreign):
    found = rows(foreign / "stories" / "data-00000-of-00001.arrow", "text")
    assert [row.value["text"] for row in found] == [
        f"A little story, number {number}." for number in range(12)
    ]
    chat = rows(foreign / "chats" / "data-00001-of-00002.arrow")[1]
    assert chat.value["messages"][1] == {"role": "assistant", "content": "4"}


def test_packed_lines_are_read(tmp_path):
    text = "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(3000))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert [row.value["text"] for row in rows(path)] == [
        f"row {i}" for i in range(3000)
    ]


def test_byte_order_mark_and_blank_lines_are_no_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "x"}\r', b"", b" ", b"{}")
    assert [(row.where, row.value) for row in rows(path)] == [
        ("a.jsonl, line 1", {"text": "x"}),
        ("a.jsonl, line 4", {}),
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": "x"', "is not JSON"),
        (b"plain text", "is not JSON"),
        (b'{"text": "\xff"}', "is not UTF-8"),
        (b"[1, 2]", r"is not an object of JSON; .*jq -c"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_line_that_is_no_row_says_why_and_the_next_is_read(tmp_path, line, why):
    path = write(tmp_path / "a.jsonl", line, b'{"text": "next"}')
    bad, good = rows(path)
    assert bad.value is None
    assert bad.where == "a.jsonl, line 1"
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(bad.error)
    assert good.value == {"text": "next"}


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_noise_is_refused_with_its_name(tmp_path, name):
    path = write(tmp_path / name, bytes(range(256)) * 9)
    with pytest.raises(ValueError, match=f"'{path}' can't be read as .*damaged, or of"):
        rows(path)


def test_truncated_files_are_refused_with_their_name(tmp_path, foreign):
    packed = write(
        tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 999)[:-9]
    )
    arrow = foreign / "stories" / "data-00000-of-00001.arrow"
    arrow.write_bytes(arrow.read_bytes()[:-300])
    for path, said in ((packed, "unpacked after line"), (arrow, "read as Arrow")):
        with pytest.raises(ValueError, match=f"'{path}' can't be {said}"):
            rows(path)


def test_without_pyarrow_the_extra_is_named(foreign, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxpar\[data\]'"):
        rows(foreign / "pandas.parquet")
    assert rows(foreign / "pandas.jsonl"), "needs none"
    monkeypatch.undo()
    assert importlib.import_module("pyarrow.parquet") is pq


def test_row_group_larger_than_the_memory_is_read(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"{number:0999}" for number in range(80_000)]
    table = pa.table({"text": texts, "image": texts})
    pq.write_table(table, path, use_dictionary=False, compression="none")
    assert pq.ParquetFile(path).num_row_groups == 1
    del table, texts
    pa.default_memory_pool().release_unused()
    Path("/proc/self/clear_refs").write_text("5")  # The most so far is forgotten.
    before = most_bytes()
    count = sum(1 for _ in read_rows(path, "a", lambda _: ["text"], lambda _: None))
    assert count == 80_000
    assert most_bytes() - before < 3e7
