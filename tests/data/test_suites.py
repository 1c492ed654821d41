"""Are held-out sets with names opened as the run reads its data?"""

import json
from pathlib import Path

import numpy as np
import pytest

import jaxpar.config
from jaxpar.data import SuitesConfig
from tests.data.tokenizers_of_others import byte_level, save


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("train", "held", "code", "prose"):
        (tmp_path / f"{name}.txt").write_text(f"the {name} text\n" * 40)
    return tmp_path


def make(files: Path, *suites: str, **options: object) -> SuitesConfig:
    names = {"data": (str(files / "train.txt"),), "heldout": (str(files / "held.txt"),)}
    return SuitesConfig(**names, suites=suites, **options)


def test_bytes_are_read_as_they_are_after_the_runs_own_set(files: Path) -> None:
    config = make(files, f"code={files}/code.txt", f"prose={files}/prose.txt")
    opened = config.open_data()
    found = config.open_suites(opened.heldout, None, 256)
    assert list(found) == ["", "code", "prose"]
    assert found[""] is opened.heldout
    assert bytes(found["code"].array) == (files / "code.txt").read_bytes()
    assert found["prose"].is_heldout


def test_without_suites_there_is_the_runs_own_set(files: Path) -> None:
    opened = make(files).open_data()
    assert make(files).open_suites(opened.heldout, None, 256) == {"": opened.heldout}


def test_byte_pairs_of_the_run_encode_its_suites(files: Path) -> None:
    config = make(files, f"code={files}/code.txt")
    opened = config.open_data().for_run(files / "run", 270)
    found = config.open_suites(opened.heldout, opened.tokenizer, 270)["code"]
    text = (files / "code.txt").read_text()
    assert found.array.tolist() == opened.tokenizer.encode(text).ids
    assert (found.num_bytes, found.is_heldout) == (len(text), True)


def test_tokenizer_of_the_config_encodes_rows_once(files: Path) -> None:
    for name in ("train", "held", "code"):
        rows = (json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(9))
        (files / f"{name}.jsonl").write_text("".join(rows))
    path = str(save(byte_level("</s>"), files))
    config = SuitesConfig(
        data=(f"{files}/train.jsonl",),
        heldout=(f"{files}/held.jsonl",),
        suites=(f"code={files}/code.jsonl",),
        tokenizer=path,
    )
    opened = config.open_data()
    size = opened.tokenizer.get_vocab_size()
    found = config.open_suites(opened.heldout, opened.tokenizer, size)["code"]
    end = opened.tokenizer.token_to_id("</s>")
    expected = [[*opened.tokenizer.encode(f"code {i}").ids, end] for i in range(9)]
    assert found.array.tolist() == [each for row in expected for each in row]


def test_suites_that_cannot_be_evaluated_are_refused(files: Path) -> None:
    for wrong in ("code", "=a.txt", "code="):
        with pytest.raises(ValueError, match=f"suites='{wrong}' must be NAME=PATH"):
            make(files, wrong).open_data()
    twice = make(files, f"code={files}/code.txt", "code=b.txt")
    with pytest.raises(
        ValueError, match=r"suites='code=b.txt' has the name of '.*code"
    ):
        twice.open_data()
    held = make(files).open_data().heldout
    with pytest.raises(FileNotFoundError, match=r"^suites=a=b.txt: 'b.txt' does not"):
        make(files, "a=b.txt").open_suites(held, None, 256)
    np.arange(300, dtype="<u2").tofile(files / "ids.bin")
    with pytest.raises(ValueError, match=r"suites=a=.*ids.bin' is token ids, but"):
        make(files, f"a={files}/ids.bin").open_suites(held, None, 256)
    ids = SuitesConfig(data=(f"{files}/ids.bin",), suites=(f"a={files}/ids.bin",))
    with pytest.raises(
        ValueError, match=r"suites=a=.*vocab_size=256 of the model is below"
    ):
        ids.open_suites(held, None, 256)


def test_flag_has_no_prefix(files: Path) -> None:
    flags = ["--suites", f"a={files}/code.txt", f"b={files}/prose.txt"]
    config = jaxpar.config.parse(SuitesConfig, None, flags)
    assert config.suites == tuple(flags[1:])
