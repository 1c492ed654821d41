"""Is every public name explicit, sorted, documented, and are there few of them?"""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpar

# Two more than the aim of 40: without cpu_devices, a mesh can't be tried on a laptop
# but by jax's own setting; StartOptions is what every recipe's config inherits.
MOST = 42
STUB = Path(jaxpar.__file__).with_suffix(".pyi")


def literal_all() -> list[str]:
    """Return __all__ as it is written, which tools must be able to read."""
    tree = ast.parse(STUB.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{STUB} has no literal __all__")


def order(name: str) -> tuple[int, str]:
    """Sort constants, then classes, then functions, as ruff does."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_public_names_are_a_sorted_list_of_few():
    names = literal_all()
    assert names == sorted(set(names), key=order)
    assert len(names) <= MOST, f"{len(names)} public names; the aim is {MOST} at most"


def test_public_names_are_all_there_is():
    tree = ast.parse(STUB.read_text())
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == set(literal_all())
    assert set(dir(jaxpar)) >= imported


def test_no_module_stands_where_a_public_name_is():
    """The import of a module would put it in the name's place."""
    modules = {path.stem for path in Path(jaxpar.__file__).parent.iterdir()}
    assert modules & set(literal_all()) <= {
        "data",
        "models",
        "optim",
        "sparse_attention",
    }, "modules"


def test_nothing_is_loaded_before_it_is_used():
    code = "import sys, jaxpar; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", literal_all())
def test_public_name_is_documented(name):
    value = getattr(jaxpar, name)
    if inspect.ismodule(value) or callable(value):
        # A dataclass without a docstring gets its signature for one.
        text = inspect.getdoc(value) or ""
        assert text, f"jaxpar.{name} has no docstring"
        assert not text.startswith(f"{name}("), f"jaxpar.{name} has no docstring"
