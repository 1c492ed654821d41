import pytest

from jaxpar.data import open_splits, stdlib_source


def test_open_splits_without_files_gives_the_standard_library():
    assert [t.sha256 for t in open_splits()] == [t.sha256 for t in stdlib_source()]


def test_open_splits_reads_each_split_from_its_files(tmp_path):
    for name in ("train", "held"):
        (tmp_path / f"{name}.txt").write_text(f"{name} text")
    train, held = open_splits(
        [str(tmp_path / "train.txt")], [str(tmp_path / "held.txt")]
    )
    assert bytes(train.array) == b"train text"
    assert bytes(held.array) == b"held text"


@pytest.mark.parametrize("given", [{"data": ["a.txt"]}, {"heldout": ["a.txt"]}])
def test_open_splits_with_one_split_says_to_give_both(given):
    with pytest.raises(ValueError, match=r"'a\.txt'.*give both, or neither"):
        open_splits(**given)
