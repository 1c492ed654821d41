import dataclasses
import hashlib
import pathlib
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data import Loader, Tokens, read_tokens


def write(path: pathlib.Path, content: bytes) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_one_text_file_is_mapped_bytes(tmp_path):
    text = "año 2026\n".encode()
    tokens = read_tokens(write(tmp_path / "a.txt", text))
    assert isinstance(tokens.array, np.memmap)
    assert tokens.array.dtype == np.uint8
    assert bytes(tokens.array) == text
    assert tokens.files == ("a.txt",)
    assert tokens.vocab_size == 256
    assert tokens.sha256 == hashlib.sha256(text).hexdigest()


def test_folder_is_read_in_order_of_relative_paths(tmp_path):
    write(tmp_path / "b.txt", b"second ")
    write(tmp_path / "a" / "z.txt", b"first ")
    write(tmp_path / "c.md", b"third")
    write(tmp_path / "empty.md", b"")
    write(tmp_path / ".hidden", b"no")
    write(tmp_path / ".git" / "config", b"no")
    tokens = read_tokens(tmp_path)
    assert tokens.files == ("a/z.txt", "b.txt", "c.md", "empty.md")
    assert bytes(tokens.array) == b"first second third"
    assert tokens.sha256 == hashlib.sha256(b"first second third").hexdigest()


def test_include_picks_files_of_folders_at_any_depth(tmp_path):
    write(tmp_path / "a.py", b"1")
    write(tmp_path / "deep" / "b.py", b"2")
    write(tmp_path / "c.txt", b"3")
    assert bytes(read_tokens(tmp_path, include="*.py").array) == b"12"
    assert bytes(read_tokens(tmp_path, include="deep/*").array) == b"2"


def test_paths_are_read_in_the_order_given(tmp_path):
    late, early = write(tmp_path / "z", b"1"), write(tmp_path / "a", b"2")
    assert bytes(read_tokens(late, early).array) == b"12"


def test_bin_is_little_endian_uint16_unless_told(tmp_path):
    path = write(tmp_path / "a.bin", bytes([1, 0, 0, 1]))
    tokens = read_tokens(path)
    assert isinstance(tokens.array, np.memmap)
    assert tokens.array.tolist() == [1, 256]
    assert tokens.vocab_size is None
    assert tokens.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_tokens(path, dtype=np.uint32).array.tolist() == [1 + 2**24]
    assert read_tokens(path, dtype=">u2").array.tolist() == [256, 1]


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", ">u2"])
def test_npy_is_mapped_in_its_own_dtype(tmp_path, dtype):
    ids = np.arange(7, dtype=dtype)
    np.save(tmp_path / "a.npy", ids)
    tokens = read_tokens(tmp_path / "a.npy")
    assert isinstance(tokens.array, np.memmap)
    np.testing.assert_array_equal(tokens.array, ids)
    assert tokens.dtype == ids.dtype
    assert tokens.sha256 == hashlib.sha256(ids.tobytes()).hexdigest()
    assert tokens.read(2, 5).tolist() == [2, 3, 4]


def test_several_token_files_stay_mapped_and_read_as_one(tmp_path):
    for name, ids in (("b", [3, 4]), ("a", [0, 1, 2]), ("c", []), ("d", [5])):
        write(tmp_path / f"{name}.bin", np.array(ids, "<u2").tobytes())
    tokens = read_tokens(tmp_path)
    assert [isinstance(part, np.memmap) for part in tokens.parts] == [1, 1, 0, 1]
    assert tokens.array.tolist() == [0, 1, 2, 3, 4, 5]
    assert tokens.read(1, 6).tolist() == [1, 2, 3, 4, 5]
    assert type(tokens.read(0, 2)) is np.ndarray


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_read_equals_slice_of_all_parts(lengths, data):
    if not sum(lengths):
        lengths = [*lengths, 1]
    ids = np.arange(sum(lengths))
    parts = tuple(np.split(ids, np.cumsum(lengths)[:-1]))
    tokens = Tokens(parts, files=("memory",))
    start = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(start, len(ids) + 2))
    np.testing.assert_array_equal(tokens.read(start, stop), ids[start:stop])
    assert tokens.sha256 == hashlib.sha256(ids.tobytes()).hexdigest()


def test_hash_of_more_than_one_chunk_is_that_of_the_whole(monkeypatch):
    monkeypatch.setattr("jaxpar.data.tokens._HASH_CHUNK", 3)
    ids = np.arange(10, dtype=np.uint16)
    tokens = Tokens((ids[:7], ids[7:]), files=("a", "b"))
    assert tokens.sha256 == hashlib.sha256(ids.tobytes()).hexdigest()


def test_mapped_corpus_is_never_loaded_whole(tmp_path):
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    tracemalloc.start()
    loader = Loader(read_tokens(path), batch_size=4, seq_len=128)
    batch = next(loader)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch["tokens"].shape == (4, 129)
    assert peak < 1 << 22


def test_tokens_are_frozen():
    tokens = Tokens((np.arange(3),), files=("a",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        tokens.files = ()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((np.zeros((2, 3), int),), r"'x' has shape \(2, 3\).*reshape"),
        ((np.zeros(3),), r"'x' holds float64, but token ids must be integers"),
        ((np.zeros(3, bool),), r"'x' holds bool, but"),
        (
            (np.zeros(3, np.uint16), np.zeros(3, np.uint32)),
            r"parts\[1\] holds uint32 and the part before it uint16",
        ),
        ((), "corpus of 1 files holds no token"),
        ((np.zeros(0, int),), "corpus of 1 files holds no token"),
    ],
)
def test_arrays_that_are_no_corpus_raise(parts, message):
    with pytest.raises(ValueError, match=message):
        Tokens(parts, files=("x",))


def test_no_path_raises():
    with pytest.raises(ValueError, match=r"paths: read_tokens\(\) was given none"):
        read_tokens()


def test_missing_path_raises(tmp_path):
    missing = re.escape(str(tmp_path / "*.bin"))
    with pytest.raises(FileNotFoundError, match=f"{missing}' does not exist.*include="):
        read_tokens(tmp_path / "*.bin")


@pytest.mark.parametrize("present", [[], ["a.txt"]])
def test_folder_without_a_fitting_file_raises(tmp_path, present):
    for name in present:
        write(tmp_path / name, b"text")
    with pytest.raises(FileNotFoundError, match=r"no file that matches include="):
        read_tokens(tmp_path, include="*.py")


@pytest.mark.parametrize("names", [["a.txt"], ["a.txt", "b.txt"], ["a.bin"]])
def test_empty_files_raise(tmp_path, names):
    for name in names:
        write(tmp_path / name, b"")
    with pytest.raises(ValueError, match=f"corpus of {len(names)} files holds no tok"):
        read_tokens(tmp_path)


def test_mixed_kinds_raise(tmp_path):
    write(tmp_path / "a.bin", b"12")
    write(tmp_path / "readme.md", b"text")
    with pytest.raises(
        ValueError, match=r"'a\.bin' \(\.bin\), 'readme\.md' \(text\) are of different"
    ):
        read_tokens(tmp_path)


def test_dtype_for_other_files_raises(tmp_path):
    path = write(tmp_path / "a.txt", b"text")
    with pytest.raises(ValueError, match=r"dtype=uint32 is for \.bin.*'a\.txt' is tex"):
        read_tokens(path, dtype="uint32")


def test_dtype_that_is_not_of_integers_raises(tmp_path):
    path = write(tmp_path / "a.bin", b"1234")
    with pytest.raises(ValueError, match="dtype=float32 must be an integer dtype"):
        read_tokens(path, dtype="float32")


def test_bin_of_odd_size_raises(tmp_path):
    path = write(tmp_path / "a.bin", b"123")
    with pytest.raises(ValueError, match=r"has 3 bytes.* multiple of the 2 bytes of a"):
        read_tokens(path)


def test_npy_that_is_none_raises(tmp_path):
    path = write(tmp_path / "a.npy", b"not an array")
    with pytest.raises(ValueError, match=r"can't be read as a \.npy array.*magic"):
        read_tokens(path)


def test_npy_of_two_dims_raises_with_its_name(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 2), int))
    with pytest.raises(ValueError, match=r"'a\.npy' has shape \(2, 2\)"):
        read_tokens(tmp_path)
