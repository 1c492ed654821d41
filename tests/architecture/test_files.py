"""Has every module of the package a test file of its name, in the same folder?

So that a red test names the broken file, and a new module is not forgotten.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

NO_LOGIC = {
    "types": "names of types",
    "sharding/tensor": "names of dims and axes",
    "launch/exit_codes": "constants",
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


def test_every_module_has_a_test_file():
    without = {module for module in modules() if not has_tests(module)}
    assert without == set(NO_LOGIC), "each needs tests/<its folder>/test_<its name>.py"
