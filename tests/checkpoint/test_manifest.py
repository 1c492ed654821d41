"""Does a manifest hold a step's files to the bit, and trust nothing that it reads?"""

import json
from pathlib import Path

import pytest

from jaxpar.checkpoint import manifest as manifests
from jaxpar.checkpoint.leaves import LeafSpec
from jaxpar.checkpoint.manifest import DIGEST, FORMAT, MANIFEST, DamagedError, Manifest


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A folder with 24 bytes in two files, sealed."""
    (tmp_path / "arrays").mkdir()
    (tmp_path / "arrays" / "one").write_bytes(bytes(range(16)))
    (tmp_path / "two").write_bytes(b"8 bytes!")
    leaves = {"w": LeafSpec((2, 3), "float32")}
    manifests.seal(
        tmp_path, Manifest(7, "run", leaves, [{"position": 3}], {"a": 1}, 0.5, {})
    )
    return tmp_path


def rewrite(folder: Path, **fields) -> None:
    """Change the manifest as somebody would who also writes its checksum."""
    content = json.loads((folder / MANIFEST).read_text()) | fields
    text = json.dumps(content).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / DIGEST).write_text(manifests.digest(text))


def test_manifest_comes_back_with_its_files(step):
    found = manifests.read_manifest(step)
    assert (found.step, found.run, found.metric) == (7, "run", 0.5)
    assert found.leaves == {"w": LeafSpec((2, 3), "float32")}
    assert (found.data_states, found.meta) == ([{"position": 3}], {"a": 1})
    assert {name: size for name, (size, _) in found.files.items()} == {
        "arrays/one": 16,
        "two": 8,
    }
    assert found.num_bytes == 24
    assert manifests.damages(step, found) == []
    assert not manifests.sizes_differ(step, found)


def test_every_kind_of_damage_is_named(step):
    found = manifests.read_manifest(step)
    (step / "arrays/one").write_bytes(bytes(16))
    (step / "two").unlink()
    (step / "two").symlink_to(step / "arrays/one")
    (step / "three").touch()
    assert manifests.damages(step, found) == [
        "arrays/one: another checksum: bytes have changed",
        "three: is not a file of the step",
        "two: is a link or not a regular file",
    ]
    (step / "two").unlink()
    (step / "arrays/one").write_bytes(bytes(17))
    wrong = manifests.damages(step, found)
    assert "arrays/one: has 17 bytes, not 16" in wrong
    assert "two: is missing" in wrong
    assert manifests.sizes_differ(step, found)


def test_changed_manifest_is_damaged(step):
    (step / MANIFEST).write_text((step / MANIFEST).read_text() + " ")
    with pytest.raises(DamagedError, match=r"manifest\.xxh3 has another checksum"):
        manifests.read_manifest(step)


def test_newer_format_says_what_to_do(step):
    rewrite(step, format=FORMAT + 1)
    with pytest.raises(ValueError, match="update jaxpar to restore it") as refused:
        manifests.read_manifest(step)
    assert not isinstance(refused.value, DamagedError)


@pytest.mark.parametrize(
    "fields",
    [
        {"step": -1},
        {"step": True},
        {"run": 3},
        {"data_states": {}},
        {"metric": "best"},
        {"leaves": {"w": {"shape": [2, -3], "dtype": "float32"}}},
        {"leaves": {"w": {"shape": [2] * 33, "dtype": "float32"}}},
        {"leaves": {"w": {"shape": [2], "dtype": "object"}}},
        {"leaves": {"w": {"shape": [10**6], "dtype": "float32"}}},
        {"files": {"../two": [8, "0" * 32]}},
        {"files": {"two": [-8, "0" * 32]}},
        {"files": {"two": [8, "checksum"]}},
        {"leaves": []},
        {"meta": None},
    ],
    ids=str,
)
def test_manifest_of_a_wrong_form_is_damaged(step, fields):
    rewrite(step, **fields)
    with pytest.raises(DamagedError, match="is not a manifest"):
        manifests.read_manifest(step)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("a/b", True),
        ("", False),
        ("/a", False),
        ("a/../b", False),
        ("./a", False),
        ("a//b", False),
        ("a\\b", False),
        ("a\0", False),
    ],
)
def test_only_relative_names_are_inside(name, inside):
    assert manifests.is_inside(name) is inside


def test_manifest_that_is_a_link_is_not_followed(step, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / MANIFEST
    (step / MANIFEST).rename(other)
    (step / MANIFEST).symlink_to(other)
    with pytest.raises(DamagedError, match="is not a file of a checkpoint"):
        manifests.read_manifest(step)
