import hashlib
import pathlib
import sysconfig
import zlib

import pytest

from jaxpar.data import stdlib_source


@pytest.fixture
def library(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"stdlib": tmp_path}[name])
    return tmp_path


def fill(root: pathlib.Path, names: list[str]) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")


def test_own_library_is_split_by_file():
    train, heldout = stdlib_source()
    assert not set(train.files) & set(heldout.files)
    assert "json/decoder.py" in {*train.files, *heldout.files}
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    for split in (train, heldout):
        assert list(split.files) == sorted(split.files)
        content = b"".join((root / name).read_bytes() for name in split.files)
        assert split.sha256 == hashlib.sha256(content).hexdigest()
    share = len(heldout.files) / (len(train.files) + len(heldout.files))
    assert 0.02 < share < 0.1
    assert len(train) > 4e6
    assert len(heldout) > 1e5


def test_split_follows_the_name_alone(library):
    names = [f"package/module_{number}.py" for number in range(100)]
    fill(library, names)
    train, heldout = stdlib_source()
    expected = sorted(name for name in names if zlib.crc32(name.encode()) % 20 == 0)
    assert expected
    assert list(heldout.files) == expected
    assert sorted({*train.files, *heldout.files}) == sorted(names)


def test_only_the_library_itself_is_read(library):
    kept = [f"module_{number}.py" for number in range(100)]
    left_out = [
        "site-packages/a.py",
        "dist-packages/a.py",
        "test/a.py",
        "unittest/test/a.py",
        "json/tests/a.py",
        "idlelib/a.py",
        "lib2to3/a.py",
        "config-3.12-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "notes.txt",
    ]
    fill(library, kept + left_out)
    train, heldout = stdlib_source()
    assert sorted({*train.files, *heldout.files}) == sorted(kept)


def test_library_of_too_few_files_raises(library):
    fill(library, ["site.py"])
    with pytest.raises(FileNotFoundError, match=r"has 1 source files, too few.*read_t"):
        stdlib_source()
