"""How does a run get its tokens, from data in any format? By one function.

Text without a tokenizer and token files are read where they are. Rows, and text with a
tokenizer, are encoded once, into a folder beside the data.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tokenizers import Tokenizer

from jaxpar.data.byte_pairs import encode, tokenize
from jaxpar.data.documents import Fields
from jaxpar.data.encoded_files import Reading, open_encoded
from jaxpar.data.encoding import read_tokenizer
from jaxpar.data.files import Named, cut_ids, find_corpus, open_ids
from jaxpar.data.packing import check_pack
from jaxpar.data.row_documents import require_bad_rows
from jaxpar.data.splits import HELD_OUT_SHARE, require_share
from jaxpar.data.stdlib import stdlib_source
from jaxpar.data.text_files import read_text, split_text
from jaxpar.data.tokens import Tokens, is_first


class Corpus(NamedTuple):
    """The data of a run, ``(train, heldout, tokenizer)``.

    Attributes:
      train: to be learned.
      heldout: held out.
      tokenizer: that made their ids; None for bytes, and where it is not known.
    """

    train: Tokens
    heldout: Tokens
    tokenizer: Tokenizer | None

    @property
    def sha256(self) -> str:
        """The identity of what is learned, for `jaxpar.open_run`."""
        return self.train.sha256

    def for_run(
        self,
        folder: str | os.PathLike[str],
        vocab_size: int,
        *,
        byte_pairs: bool = True,
        cache: str | os.PathLike[str] | None = None,
    ) -> "Corpus":
        """Encode bytes for a model that can, and check the data against the model.

        Args:
          folder: of the run, where a trained ``tokenizer.json`` is.
          vocab_size: of the model.
          byte_pairs: whether bytes become byte pairs, if the model has more than 256.
          cache: the folder of the byte pairs' cache; None for one beside the data.

        Returns:
          The data that the model reads.

        Raises:
          ValueError: if the data has more different ids than the model.
        """
        found = self
        if self.tokenizer is None and byte_pairs:
            found = Corpus(*tokenize(*self[:2], vocab_size, folder, cache=cache))
        for split in found[:2]:
            split.require_vocabulary(vocab_size)
        return found


def open_corpus(
    paths: Sequence[str | os.PathLike[str]] = (),
    *,
    heldout: Sequence[str | os.PathLike[str]] = (),
    tokenizer: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    text: str = Fields.text,
    prompt: str | None = None,
    answer: str | None = None,
    bad_rows: str = "stop",
    eos_token: str | None = None,
    heldout_share: float = HELD_OUT_SHARE,
) -> Corpus:
    """Open the training and the held-out tokens of data in any known format.

    Args:
      paths: files and folders of one kind: text in UTF-8; rows (``.jsonl``,
        ``.jsonl.gz``, ``.parquet``, a folder that Hugging Face's ``save_to_disk``
        wrote); token ids (``.npy``, ``.bin``). None for the standard library's source.
      heldout: held-out data in the same form; none to hold a share of `paths` out.
      tokenizer: a ``tokenizer.json``; None for bytes. Token files need none.
      cache: the folder where encoded data is kept; None for ``.jaxpar`` beside it.
      text: the field of a row's text. A row without it may have "messages", or a
        "prompt" with its "completion" or "response" (`jaxpar.data.documents`).
      prompt: the field of a row's prompt; given with `answer`.
      answer: the field of the prompt's answer.
      bad_rows: "stop" or "skip" rows that are not documents.
      eos_token: the token that ends documents; None for the tokenizer's own, or for
        the byte 0 where rows are read as bytes.
      heldout_share: of the documents that is held out if `heldout` is not given.

    Returns:
      (train, heldout, tokenizer).

    Raises:
      ValueError: if a file is not of a known format, a row is bad, fields are missing,
        the cache can't be written, or there is too little to hold out a share.
      FileNotFoundError: if there is no such file.
      ModuleNotFoundError: for parquet and Arrow, if pyarrow is not installed.
    """
    require_bad_rows(bad_rows)
    require_share(heldout_share)
    if heldout and not paths:
        raise ValueError(
            f"heldout={tuple(map(str, heldout))} is given without data; give both, or "
            "neither for the standard library's source."
        )
    found = eos = None
    if tokenizer is not None:
        found, eos = read_tokenizer(Path(tokenizer))
    end = eos if eos_token is None else eos_token
    fields = Fields(text, prompt, answer)
    reading = Reading(found, end, cache, fields, bad_rows == "skip")
    files, kind = find_corpus(paths) if paths else ([], "text")
    if eos_token is not None and not reading.writes_end(kind):
        raise ValueError(
            f"eos_token={eos_token!r}: no end is written into text that is read as "
            "bytes, nor into token files; give a tokenizer for text, or no eos_token."
        )
    if not paths:
        train, held = (
            each if found is None else encode(found, each, ends=True, eos_token=end)
            for each in stdlib_source()
        )
    elif heldout:
        train = _read(files, kind, Path(paths[0]), 0.0, reading)[0]
        with _named_errors():
            held_files, held_kind = find_corpus(heldout)
            require_same_kind(held_files[0][0], held_kind, files[0][0], kind)
            held = _read(held_files, held_kind, Path(heldout[0]), 0.0, reading)[0]
    else:
        train, held = _read(files, kind, Path(paths[0]), heldout_share, reading)
    return Corpus(train, dataclasses.replace(held, is_heldout=True), found)


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Say in errors of held-out data that they are of it."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        kind = ValueError if isinstance(error, ValueError) else FileNotFoundError
        raise kind(f"heldout: {str(error).removeprefix('paths: ')}") from error


def require_same_kind(name: str, kind: str, of_data: str, kind_of_data: str) -> None:
    """Check that held-out data is of the data's kind.

    Args:
      name: of a held-out file.
      kind: its kind, as `find_corpus` names it.
      of_data: the name of a file of the data.
      kind_of_data: its kind.

    Raises:
      ValueError: if one is text, rows or token ids, and the other is not.
    """
    said = [
        "token ids" if kind in (".npy", ".bin") else kind
        for kind in (kind, kind_of_data)
    ]
    if said[0] != said[1]:
        raise ValueError(
            f"{name!r} is {said[0]}, but {of_data!r} of the data is {said[1]}; give "
            "held-out data of the same kind."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Fields of a recipe's config that say which data it trains on.

    A recipe's config derives from it, so that the flags have no prefix.
    """

    data: tuple[str, ...] = ()
    """Text, .jsonl, .parquet, folders of datasets, .bin or .npy; else Python's."""
    heldout: tuple[str, ...] = ()
    """Held-out data in the same form; by default 5 % of the documents."""
    tokenizer: str | None = None
    """A tokenizer.json; by default byte pairs of the data where the model has them."""
    data_cache: str | None = None
    """Folder for encoded data; by default .jaxpar beside the data."""
    text_field: str = Fields.text
    """Field of a row's text; else it has messages, or a prompt and completion."""
    prompt_field: str | None = None
    """Field of a row's prompt, which is not learned; with --answer-field."""
    answer_field: str | None = None
    """Field of the prompt's answer."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """Stop at rows that are not documents, or skip them."""

    def open_data(self, *, pack: bool | None = None) -> Corpus:
        """Open the data by `open_corpus`.

        Args:
          pack: whether the run packs documents, or cuts the text in windows; None not
            to check that the data can be.

        Returns:
          (train, heldout, tokenizer).

        Raises:
          ValueError: as in `open_corpus` and `jaxpar.data.rows_of`.
        """
        opened = open_corpus(
            self.data,
            heldout=self.heldout,
            tokenizer=self.tokenizer,
            cache=self.data_cache,
            text=self.text_field,
            prompt=self.prompt_field,
            answer=self.answer_field,
            bad_rows=self.bad_rows,
        )
        if pack is not None:
            for split in opened[:2]:
                check_pack(split, pack)
        return opened


def _read(
    files: Sequence[Named], kind: str, source: Path, share: float, reading: Reading
) -> tuple[Tokens, Tokens]:
    """Read data of any kind; with share 0, all of it is in both splits."""
    train = heldout = None
    held_out_text = ""
    if reading.writes_end(kind):
        train, heldout, held_out_text = open_encoded(
            files, kind, source, share, reading
        )
    elif kind == "text" and share:
        train, heldout, held_out_text = split_text(files, share)
    elif kind == "text":
        train = read_text(files)
    else:
        train = open_ids(files, kind)
        if share:
            train, heldout = cut_ids(train, share)
            held_out_text = f"the last {len(heldout):,} tokens"
    if held_out_text and is_first():
        print(f"held out {held_out_text}")
    return train, train if heldout is None else heldout
