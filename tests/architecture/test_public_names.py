"""Is every public name explicit, sorted, documented, and are there few of them?"""

import ast
import inspect
from pathlib import Path

import pytest

import jaxpar

MOST = 40


def literal_all() -> list[str]:
    """Return __all__ as it is written, which tools must be able to read."""
    tree = ast.parse(Path(jaxpar.__file__).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError("jaxpar/__init__.py has no literal __all__")


def order(name: str) -> tuple[int, str]:
    """Sort constants, then classes, then functions, as ruff does."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_public_names_are_a_sorted_list_of_few():
    names = literal_all()
    assert names == sorted(set(names), key=order)
    assert len(names) <= MOST, f"{len(names)} public names; the aim is {MOST} at most"


def test_public_names_are_all_there_is():
    names = set(literal_all())
    assert names <= set(vars(jaxpar))
    unlisted = {
        name
        for name, value in vars(jaxpar).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    } - names
    assert not unlisted, f"add {sorted(unlisted)} to __all__, or import less"


@pytest.mark.parametrize("name", literal_all())
def test_public_name_is_documented(name):
    value = getattr(jaxpar, name)
    if inspect.ismodule(value) or callable(value):
        # A dataclass without a docstring gets its signature for one.
        text = inspect.getdoc(value) or ""
        assert text, f"jaxpar.{name} has no docstring"
        assert not text.startswith(f"{name}("), f"jaxpar.{name} has no docstring"
