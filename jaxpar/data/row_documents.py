"""Which documents are in files of rows, and what becomes of bad rows?"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from jaxpar.data.documents import BadRowError, Fields, TextSpan
from jaxpar.data.encoding import Document
from jaxpar.data.read_rows import Advance, Row, read_rows
from jaxpar.data.splits import is_heldout

BAD_ROWS = ("stop", "skip")


@dataclasses.dataclass
class RowCounts:
    """What was found while rows were read.

    Attributes:
      rows: all but blank lines.
      documents: those of which something is learned.
      empty: rows without text to be learned; they are left out.
      bad: rows that are not documents.
      first_bad: the first of them, and why; "" without one.
    """

    rows: int = 0
    documents: int = 0
    empty: int = 0
    bad: int = 0
    first_bad: str = ""

    def left_out(self) -> list[str]:
        """A line on the empty rows, and one on the bad rows, where there are any."""
        empty = f"empty    {self.empty:,} of {self.rows:,} rows left out: there is "
        bad = f"bad rows {self.bad:,} of {self.rows:,} rows skipped; the first: "
        said = [empty + "nothing to learn in them"] if self.empty else []
        return said + ([bad + self.first_bad] if self.bad else [])


def bad_row_error(first_bad: str) -> ValueError:
    """The error of a run that is to stop at bad rows."""
    return ValueError(
        f"{first_bad}. Correct it, or skip bad rows (bad_rows='skip', --bad-rows skip)."
    )


def require_bad_rows(bad_rows: str) -> None:
    """Raise ValueError for what is not one of `BAD_ROWS`."""
    if bad_rows not in BAD_ROWS:
        raise ValueError(f"bad_rows={bad_rows!r} must be one of {', '.join(BAD_ROWS)}.")


@dataclasses.dataclass(frozen=True)
class RowFiles:
    """Files of rows, as a stream of documents.

    Attributes:
      files: (name, path) pairs.
      fields: where in a row a document is.
      share: of the documents that is held out, by a hash of their text.
      skip_bad_rows: whether bad rows are skipped, not an error.
      end: text that ends documents, and so can't be in one; "" for none.
    """

    files: Sequence[tuple[str, Path]]
    fields: Fields
    share: float
    skip_bad_rows: bool
    end: str = ""

    def documents(self, counts: RowCounts, advance: Advance) -> Iterator[Document]:
        """Read the documents.

        Args:
          counts: updated.
          advance: called with the bytes of the files that are done.

        Raises:
          ValueError: for a bad row, unless they are skipped; for a file without the
            fields or of another format, and if every row is bad.
        """
        for name, path in self.files:
            for row in read_rows(path, name, self._columns_of(name), advance):
                counts.rows += 1
                spans = self._spans(row, counts)
                if spans:
                    counts.documents += 1
                    yield Document(spans, is_heldout(_hash(spans), self.share))
        if counts.bad and not counts.documents:
            raise ValueError(
                f"all {counts.rows:,} rows are bad or empty; the first bad one: "
                f"{counts.first_bad}."
            )

    def _columns_of(self, name: str) -> Any:
        def columns(names: Sequence[str]) -> Sequence[str]:
            try:
                return self.fields.of(names)
            except BadRowError as error:
                raise ValueError(f"{name} {error}.") from None

        return columns

    def _spans(self, row: Row, counts: RowCounts) -> list[TextSpan]:
        error: Any = row.error
        if row.value is not None:
            try:
                spans = self._whole(self.fields.document(row.value))
                counts.empty += not spans
                return spans
            except BadRowError as bad:
                error = bad
        bad_row = f"{row.where}: {error}"
        if not self.skip_bad_rows:
            raise bad_row_error(bad_row)
        counts.bad += 1
        counts.first_bad = counts.first_bad or bad_row
        return []

    def _whole(self, spans: list[TextSpan]) -> list[TextSpan]:
        if self.end and any(self.end in span.text for span in spans):
            raise BadRowError(
                f"has {self.end!r} in its text, which ends documents that are read as "
                "bytes; give a tokenizer, or another eos_token="
            )
        return spans


def _hash(spans: Sequence[TextSpan]) -> int:
    return xxhash.xxh3_64_intdigest("".join(span.text for span in spans).encode())
