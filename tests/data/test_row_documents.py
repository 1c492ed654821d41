"""Are documents read from rows, and bad rows named and counted?"""

import json
from pathlib import Path

import pytest

from jaxpar.data.documents import Fields
from jaxpar.data.row_documents import (
    RowCounts,
    RowFiles,
    bad_row_error,
    require_bad_rows,
)


def texts(source: RowFiles, counts: RowCounts | None = None) -> list[str]:
    counts = RowCounts() if counts is None else counts
    return [
        "".join(span.text for span in document.spans)
        for document in source.documents(counts, lambda _: None)
    ]


def lines(path: Path, *rows: object) -> RowFiles:
    content = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(content))
    return RowFiles([(path.name, path)], Fields(), 0.0, skip_bad_rows=True)


BAD = ({"text": "one"}, "{", {"text": 2}, {"text": ""}, {"text": "three"})


def test_bad_rows_are_counted_and_the_first_is_named(tmp_path):
    counts = RowCounts()
    assert texts(lines(tmp_path / "a.jsonl", *BAD), counts) == ["one", "three"]
    assert (counts.rows, counts.documents, counts.empty, counts.bad) == (5, 2, 1, 2)
    empty, bad = counts.left_out()
    assert empty == "empty    1 of 5 rows left out: there is nothing to learn in them"
    assert bad.startswith(
        "bad rows 2 of 5 rows skipped; the first: a.jsonl, line 2: is not JSON ("
    )


def test_bad_row_stops_with_file_and_line(tmp_path):
    source = lines(tmp_path / "a.jsonl", *BAD[:1], *BAD[2:])
    source = RowFiles(source.files, Fields(), 0.0, skip_bad_rows=False)
    with pytest.raises(
        ValueError,
        match=r"^a\.jsonl, line 2: 'text' must be text, but is a number\. Correct it",
    ):
        texts(source)


def test_bad_row_of_parquet_is_named_by_its_number(foreign):
    files = [("pandas.parquet", foreign / "pandas.parquet")]
    counts = RowCounts()
    assert texts(RowFiles(files, Fields("story"), 0.0, skip_bad_rows=True), counts) == [
        "One.",
        "Two, größer.",
    ]
    assert counts.first_bad == (
        "pandas.parquet, row 3 (from 0): 'story' must be text, but is missing or null"
    )


def test_parquet_without_the_field_lists_its_fields(foreign):
    files = [("pandas.parquet", foreign / "pandas.parquet")]
    with pytest.raises(
        ValueError,
        match=r"^pandas\.parquet has the fields 'id', 'story', 'embedding', n",
    ):
        texts(RowFiles(files, Fields(), 0.0, skip_bad_rows=True))


def test_only_bad_rows_are_an_error(tmp_path):
    source = lines(tmp_path / "a.jsonl", {"body": "x"}, {"body": "y"})
    with pytest.raises(ValueError, match=r"all 2 rows are bad .*: a\.jsonl, line 1"):
        texts(source)


def test_documents_are_held_out_by_their_text_alone(tmp_path):
    def held(name: str, *rows: dict[str, str]) -> set[str]:
        source = lines(tmp_path / name, *rows)
        source = RowFiles(source.files, Fields(), 0.05, skip_bad_rows=False)
        return {
            "".join(span.text for span in document.spans)
            for document in source.documents(RowCounts(), lambda _: None)
            if document.is_heldout
        }

    rows = [{"text": f"document {number}"} for number in range(1000)]
    first = held("a.jsonl", *rows)
    assert 30 < len(first) < 70
    more = [{"text": f"another {number}"} for number in range(500)]
    again = held("b.jsonl", *more, *reversed(rows), rows[0])
    assert {text for text in again if text.startswith("document")} == first


def test_word_for_bad_rows_is_one_of_two():
    require_bad_rows("skip")
    with pytest.raises(ValueError, match="bad_rows='drop' must be one of stop, skip"):
        require_bad_rows("drop")
    assert str(bad_row_error("x.jsonl, line 1: no")).startswith(
        "x.jsonl, line 1: no. Corr"
    )
