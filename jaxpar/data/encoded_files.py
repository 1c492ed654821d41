"""Which tokens are rows, or text with a tokenizer? Encoded once, and kept beside them.

The first start encodes; later ones, of any run and process, open what it wrote, as long
as the files have the same names, sizes and times, and are read in the same way.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from jaxpar.data.cache import cached, identity_of, root_for
from jaxpar.data.documents import Fields
from jaxpar.data.encoding import (
    Document,
    Encoder,
    bytes_encoder,
    encode_documents,
    tokenizer_encoder,
)
from jaxpar.data.files import Named
from jaxpar.data.row_documents import RowCounts, RowFiles, bad_row_error
from jaxpar.data.text_documents import documents_of
from jaxpar.data.text_files import read_text, split_text
from jaxpar.data.token_files import SPLITS, open_split, write_tokens
from jaxpar.data.tokens import Tokens, first_of, is_first
from jaxpar.progress import counting


@dataclasses.dataclass(frozen=True)
class Reading:
    """How data is read.

    Attributes:
      tokenizer: encodes it; None for bytes.
      eos_token: ends documents; None for the tokenizer's own, or the byte 0.
      cache: the folder of the caches; None for one beside the data.
      fields: where in a row a document is.
      skip_bad_rows: whether bad rows are skipped, not an error.
    """

    tokenizer: Tokenizer | None
    eos_token: str | None
    cache: str | os.PathLike[str] | None
    fields: Fields
    skip_bad_rows: bool

    def writes_end(self, kind: str) -> bool:
        """Whether data is encoded, and documents get an end; else read as it is."""
        return kind == "rows" or (kind == "text" and self.tokenizer is not None)

    def encoder(self) -> Encoder:
        """Make the encoder."""
        if self.tokenizer is None:
            return bytes_encoder(self.eos_token)
        return tokenizer_encoder(self.tokenizer, self.eos_token)


def open_encoded(
    files: Sequence[Named], kind: str, source: Path, share: float, reading: Reading
) -> tuple[Tokens, Tokens | None, str]:
    """Open what files are encoded to, or encode them.

    Args:
      files: (name, path) pairs.
      kind: "rows" or "text".
      source: the file or folder that the cache is beside.
      share: of the documents that is held out.
      reading: how they are read.

    Returns:
      (train, heldout, held_out_text): heldout is None for share 0; the text says what
      is held out.

    Raises:
      ValueError: if there is a bad row, unless they are skipped; no document, or too
        few for two splits; as `RowFiles.documents`, `split_text` and `cached` do.
    """
    encoder, identity = reading.encoder(), identity_of(files)
    text = "" if reading.tokenizer is None else reading.tokenizer.to_str()
    key = {
        "files": identity,
        "tokenizer": text and hashlib.sha256(text.encode()).hexdigest(),
        "end": encoder.end.tolist(),
        "fields": dataclasses.asdict(reading.fields) if kind == "rows" else None,
        "heldout_share": share,
    }
    end = "" if text else bytes(encoder.end).decode()
    rows = RowFiles(files, reading.fields, share, reading.skip_bad_rows, end)

    def build(folder: Path) -> dict[str, Any]:
        build = _Build(folder, files, encoder, is_text=not text)
        index = build.rows(rows) if kind == "rows" else build.text(share)
        if identity_of(files) != identity:
            raise ValueError(
                f"'{files[0][1]}' or another file of the data was written while it was "
                "read; start again once it is complete."
            )
        return index

    folder, index = cached(root_for([source], reading.cache), key, build)
    counts = RowCounts(**index["rows"])
    if counts.bad and not reading.skip_bad_rows:
        raise bad_row_error(counts.first_bad)
    for line in counts.left_out() if is_first() else ():
        print(line)
    names = tuple(name for name, _ in files)
    train, heldout = (open_split(folder, index, split, names) for split in SPLITS)
    assert train is not None, "checked when it was written"
    return train, heldout, index["held_out"]


@dataclasses.dataclass(frozen=True)
class _Build:
    """Encodes files into an empty folder."""

    folder: Path
    files: Sequence[Named]
    encoder: Encoder
    is_text: bool

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Callable[[int], None]]:
        total = sum(path.stat().st_size for _, path in self.files)
        what = "reading" if self.is_text else "tokenizing"
        what += f" {first_of([name for name, _ in self.files])}"
        with counting(what, total, unit="B", shown=is_first()) as advance:
            yield advance

    def text(self, share: float) -> dict[str, Any]:
        """Encode text files, each a document."""
        if share:
            *splits, held_out_text = split_text(self.files, share)
        else:
            splits, held_out_text = [read_text(self.files)], ""
        with self._progress() as advance:
            documents = itertools.chain.from_iterable(
                documents_of(text, is_heldout=bool(at), ends=True, advance=advance)
                for at, text in enumerate(splits)
            )
            index = self._write(documents)
        return {
            **index,
            "rows": dataclasses.asdict(RowCounts()),
            "held_out": held_out_text,
        }

    def rows(self, source: RowFiles) -> dict[str, Any]:
        """Encode rows; hold out the last documents if the hash leaves a split empty."""
        with self._progress() as advance:
            counts = RowCounts()
            index = self._write(source.documents(counts, advance))
        held = index["splits"].get("heldout", {"documents": 0})["documents"]
        held_out_text = (
            f"{held:,} of {counts.documents:,} documents, by a hash of their content"
        )
        if not counts.documents:
            names = ", ".join(name for name, _ in self.files)
            raise ValueError(f"paths: {names}: there is no row with text; give others.")
        if source.share and len(index["splits"]) < len(SPLITS):
            num = round(counts.documents * source.share)
            num = max(1, min(num, counts.documents - 1))
            index = self._last_held_out(source, counts.documents - num)
            held_out_text = f"the last {num:,} of {counts.documents:,} documents"
        if source.share and len(index["splits"]) < len(SPLITS):
            raise ValueError(
                f"heldout: {held_out_text} of {self.files[0][0]!r} gives no tokens in "
                "one split; give held-out files (--heldout), or more data."
            )
        held_out_text = held_out_text if source.share else ""
        return {**index, "rows": dataclasses.asdict(counts), "held_out": held_out_text}

    def _last_held_out(self, source: RowFiles, first: int) -> dict[str, Any]:
        if not first:
            raise ValueError(
                f"heldout: {self.files[0][0]!r} has one document, of which none can be "
                "held out; give held-out files (--heldout), or more data."
            )
        for path in self.folder.iterdir():
            path.unlink()
        documents = source.documents(RowCounts(), lambda _: None)
        return self._write(
            dataclasses.replace(document, is_heldout=number >= first)
            for number, document in enumerate(documents)
        )

    def _write(self, documents: Iterable[Document]) -> dict[str, Any]:
        stream = encode_documents(documents, self.encoder)
        return write_tokens(self.folder, stream, self.encoder)
