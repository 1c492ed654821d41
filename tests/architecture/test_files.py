"""Has every module of the package a test file of its name, in the same folder?

So that a red test names the broken file, and a new module is not forgotten.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

NO_LOGIC = {
    "exit_codes": "constants",
    "types": "names of types",
    "sharding/tensor": "names of dims and axes",
    "launch/gloo": "one setting, which tests/multiprocess needs",
}
"""Modules without a test file -> why."""


def modules() -> Iterator[str]:
    """Every module with a name, without its suffix."""
    for path in sorted((ROOT / "jaxpar").rglob("*.py")):
        if not path.stem.startswith("__"):
            yield path.relative_to(ROOT / "jaxpar").with_suffix("").as_posix()


def has_tests(module: str) -> bool:
    """Whether its folder, or the one above in jaxpar/, has a file of its name."""
    *folders, name = module.split("/")
    places = {"/".join(folders), *folders[:1]}
    return any(
        (ROOT / "tests" / place / f"test_{name}.py").exists() for place in places
    )


@pytest.mark.parametrize("module", list(modules()))
def test_module_has_a_test_file(module):
    is_excused = module in NO_LOGIC
    assert has_tests(module) != is_excused, (
        f"jaxpar/{module}.py has a test file and is on the list of those without"
        if is_excused
        else f"jaxpar/{module}.py needs tests/{module.rpartition('/')[0]}/"
        f"test_{module.rpartition('/')[2]}.py"
    )


def test_excused_modules_exist():
    assert not set(NO_LOGIC) - set(modules())
