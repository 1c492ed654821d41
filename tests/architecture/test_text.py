"""Is the tree free of anything that holds on one machine only?"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = (
    "*.md",
    "*.toml",
    ".gitignore",
    ".pre-commit-config.yaml",
    "LICENSE",
    "Makefile",
    ".ci/*",
    ".ci/constraints/*",
    ".github/**/*",
    "jaxpar/**/*",
    "kernels_pallas/**/*",
    "tests/**/*",
    "recipes/**/*",
    "benchmarks/**/*",
)

HOMES = ("work", "root", "home", "Users")
HOSTS = ("pypi", "pythonhosted", "npmjs")
# A path from the root of a file system: not part of a longer path or of an address.
MACHINE_PATH = re.compile(rf"(?<![\w.~*>)\]}}-])/({'|'.join(HOMES)})/\w")
REGISTRY = re.compile(rf"\b({'|'.join(HOSTS)})\.(org|com)\b")


def text_files() -> list[Path]:
    files = {file for place in PLACES for file in ROOT.glob(place) if file.is_file()}
    return sorted(
        file
        for file in files
        if "__pycache__" not in file.parts and b"\0" not in file.read_bytes()
    )


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY], ids=["path", "registry"])
def test_text_names_no_machine_and_no_registry(pattern):
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in text_files()
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, found


def test_text_files_are_found_where_they_are():
    names = {file.relative_to(ROOT).as_posix() for file in text_files()}
    assert {"Makefile", ".ci/setup", "jaxpar/mesh.py", "pyproject.toml"} <= names


@pytest.mark.parametrize("home", HOMES)
def test_machine_path_is_found_from_the_root_only(home):
    assert MACHINE_PATH.search(f"cd /{home}/someone")
    assert MACHINE_PATH.search(f'"/{home}/someone"')
    assert not MACHINE_PATH.search(f"example.org/{home}/someone")


def test_registry_is_found_in_an_address():
    assert REGISTRY.search("https://{}.org/simple".format("pypi"))
