"""How are rows read from a file: lines of JSON, parquet, or Arrow, in bounded memory.

Grain's ``ParquetIterDataset`` holds a whole row group in memory, with all columns, and
doesn't say which row it gives; pyarrow reads the columns that are needed in batches.
"""

import contextlib
import dataclasses
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxpar.launch.extras import import_extra

Advance = Callable[[int], None]

_BATCH_ROWS = 256
_BUFFER_BYTES = 1 << 20
"""Of a compressed column chunk that is held at a time."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row, or why there is none.

    Attributes:
      where: its file and line, or number.
      value: names and values; None if it can't be read.
      error: why it can't.
    """

    where: str
    value: dict[str, Any] | None
    error: str = ""


def read_rows(
    path: Path,
    name: str,
    columns: Callable[[Sequence[str]], Sequence[str]],
    advance: Advance,
) -> Iterator[Row]:
    """Read the rows of a file.

    Args:
      path: ``.jsonl``, ``.ndjson`` or ``.json`` with an object in each line, plain or
        with ``.gz``; ``.parquet``; ``.arrow``.
      name: of the file, for messages.
      columns: chooses those to read of the columns of a parquet or Arrow file.
      advance: called with the bytes of the file that are done.

    Yields:
      Every row but blank lines, in order.

    Raises:
      ValueError: if the file is not of its format, or damaged.
      ModuleNotFoundError: for parquet and Arrow, if pyarrow is not installed.
    """
    suffix = path.name.lower().removesuffix(".gz").rsplit(".", 1)[-1]
    if suffix == "parquet":
        yield from _parquet(path, name, columns, advance)
    elif suffix == "arrow":
        yield from _arrow(path, name, columns, advance)
    else:
        yield from _lines(path, name, advance)


def _lines(path: Path, name: str, advance: Advance) -> Iterator[Row]:
    done, number = 0, 0
    is_packed = path.suffix.lower() == ".gz"
    with path.open("rb") as raw:
        file: Any = gzip.GzipFile(fileobj=raw) if is_packed else raw
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _row_of(line, f"{name}, line {number:,}", number == 1)
                if number % _BATCH_ROWS == 0:
                    advance(raw.tell() - done)
                    done = raw.tell()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(
                f"'{path}' can't be unpacked after line {number:,} ({error}); write it "
                "again, or copy the whole file."
            ) from error
        advance(raw.tell() - done)


def _row_of(line: bytes, where: str, is_first: bool) -> Row:
    try:
        value = json.loads(line.decode("utf-8-sig" if is_first else "utf-8"))
    except UnicodeDecodeError as error:
        return Row(where, None, f"is not UTF-8 ({error.reason})")
    except (ValueError, RecursionError) as error:
        return Row(where, None, f"is not JSON ({error})")
    if not isinstance(value, dict):
        said = "is not an object of JSON; there must be one in each line"
        if isinstance(value, list) and is_first:
            said += " (jq -c '.[]' writes a list so)"
        return Row(where, None, said)
    return Row(where, value)


def _parquet(
    path: Path,
    name: str,
    columns: Callable[[Sequence[str]], Sequence[str]],
    advance: Advance,
) -> Iterator[Row]:
    parquet = _pyarrow("pyarrow.parquet", path)
    with _named_errors(path, "parquet"):
        # Buffered before, a row group's column is in memory as a whole.
        file = parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    with file:
        chosen = columns(file.schema_arrow.names)
        batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=list(chosen))
        each = path.stat().st_size / max(file.metadata.num_rows, 1)
        yield from _rows_of(batches, path, name, "parquet", each, advance)


def _arrow(
    path: Path,
    name: str,
    columns: Callable[[Sequence[str]], Sequence[str]],
    advance: Advance,
) -> Iterator[Row]:
    pyarrow, ipc = _pyarrow("pyarrow", path), _pyarrow("pyarrow.ipc", path)

    def batches(reader: Any) -> Iterator[Any]:
        for batch in reader:
            # A file's batch may be large; its rows become Python's a few at a time.
            for start in range(0, len(batch), _BATCH_ROWS):
                yield batch.select(chosen).slice(start, _BATCH_ROWS)

    # Not a memory map: that would die with a file that is truncated.
    with pyarrow.OSFile(str(path)) as source:
        with _named_errors(path, "Arrow"):
            reader = ipc.open_stream(source)
        chosen = list(columns(reader.schema.names))
        yield from _rows_of(batches(reader), path, name, "Arrow", 0.0, advance)
    advance(path.stat().st_size)


def _rows_of(
    batches: Iterator[Any],
    path: Path,
    name: str,
    kind: str,
    row_bytes: float,
    advance: Advance,
) -> Iterator[Row]:
    number = 0
    while True:
        with _named_errors(path, kind):
            batch = next(batches, None)
            rows = [] if batch is None else batch.to_pylist()
        if batch is None:
            return
        for row in rows:
            yield Row(f"{name}, row {number:,} (from 0)", row)
            number += 1
        advance(round(row_bytes * len(rows)))


@contextlib.contextmanager
def _named_errors(path: Path, kind: str) -> Iterator[None]:
    """Name the file in the errors of pyarrow, which are ValueError or OSError."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(
            f"'{path}' can't be read as {kind} ({error}); it is damaged, or of another "
            "format: write it again."
        ) from error


def _pyarrow(module: str, path: Path) -> Any:
    return import_extra(module, f"{str(path)!r}")
