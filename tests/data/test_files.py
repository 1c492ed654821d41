"""Is each file read by its format, and what is none refused?"""

import hashlib
import pathlib
import re
import tracemalloc

import numpy as np
import pytest

from jaxpar.data import Loader, read_tokens
from jaxpar.data.disk_array import DiskArray
from jaxpar.data.files import cut_ids, find_files


def write(path: pathlib.Path, content: bytes) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_text_file_is_its_bytes_on_disk(tmp_path):
    text = "año 2026\n".encode()
    tokens = read_tokens(write(tmp_path / "a.txt", text))
    assert isinstance(tokens.parts[0], DiskArray)
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
    assert isinstance(tokens.parts[0], DiskArray)
    assert tokens.array.tolist() == [1, 256]
    assert tokens.vocab_size is None
    assert tokens.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_tokens(path, dtype=np.uint32).array.tolist() == [1 + 2**24]
    assert read_tokens(path, dtype=">u2").array.tolist() == [256, 1]


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", ">u2"])
def test_npy_is_read_in_its_own_dtype(tmp_path, dtype):
    ids = np.arange(7, dtype=dtype)
    np.save(tmp_path / "a.npy", ids)
    tokens = read_tokens(tmp_path / "a.npy")
    assert isinstance(tokens.parts[0], DiskArray)
    np.testing.assert_array_equal(tokens.array, ids)
    assert tokens.dtype == ids.dtype
    assert tokens.sha256 == hashlib.sha256(ids.tobytes()).hexdigest()
    assert tokens.read(2, 5).tolist() == [2, 3, 4]


def test_several_token_files_are_read_as_one(tmp_path):
    for name, ids in (("b", [3, 4]), ("a", [0, 1, 2]), ("c", []), ("d", [5])):
        write(tmp_path / f"{name}.bin", np.array(ids, "<u2").tobytes())
    tokens = read_tokens(tmp_path)
    assert [len(part) for part in tokens.parts] == [3, 2, 0, 1]
    assert tokens.array.tolist() == [0, 1, 2, 3, 4, 5]
    assert tokens.read(1, 6).tolist() == [1, 2, 3, 4, 5]
    assert type(tokens.read(0, 2)) is np.ndarray


def test_corpus_on_disk_is_never_loaded_whole(tmp_path):
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


def test_no_path_raises():
    with pytest.raises(ValueError, match=r"paths: there is none; give a text"):
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


def test_rows_are_not_text(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "syntax is not to be learned"}\n')
    with pytest.raises(
        ValueError, match=r"'a\.jsonl' has a document in each row; .*op"
    ):
        read_tokens(path)


@pytest.mark.parametrize(
    "name", ["a.parquet", "A.JSONL", "b.json", "c.jsonl.gz", "d.ndjson.gz"]
)
def test_rows_are_known_by_their_suffix(tmp_path, name):
    path = write(tmp_path / name, b"noise")
    with pytest.raises(ValueError, match="has a document in each row"):
        read_tokens(path)


def test_saved_dataset_is_the_files_that_it_lists(foreign):
    found = find_files(foreign / "chats", "*")
    names = [f"chats/data-0000{shard}-of-00002.arrow" for shard in (0, 1)]
    assert [name for name, _ in found] == names
    assert all(path.is_file() for _, path in found)


def test_several_saved_datasets_are_named(foreign):
    with pytest.raises(
        ValueError, match=r"holds the datasets train, test; give .*train"
    ):
        find_files(foreign / "both", "*")


def test_end_of_token_files_is_cut_off(tmp_path):
    for name, ids in (("a", range(30)), ("b", range(30, 40))):
        write(tmp_path / f"{name}.bin", np.array(ids, "<u2").tobytes())
    train, heldout = cut_ids(read_tokens(tmp_path), 0.15)
    assert train.array.tolist() == [*range(34)]
    assert heldout.array.tolist() == [*range(34, 40)]
    assert (train.files, heldout.files) == (("a.bin", "b.bin"), ("b.bin",))


def test_too_few_tokens_are_not_cut(tmp_path):
    write(tmp_path / "a.bin", b"12")
    with pytest.raises(ValueError, match="heldout: 1 tokens are too few to hold 5%"):
        cut_ids(read_tokens(tmp_path), 0.05)


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_two_ids_are_cut_by_any_share(tmp_path, share):
    np.arange(2, dtype="<u2").tofile(tmp_path / "a.bin")
    train, heldout = cut_ids(read_tokens(tmp_path), share)
    assert (train.array.tolist(), heldout.array.tolist()) == ([0], [1])
