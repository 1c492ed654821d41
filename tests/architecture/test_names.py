"""Is every name of jaxpar that a page or a message has there after `import jaxpar`?"""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import jaxpar
from tests.architecture.test_docs import PAGES
from tests.architecture.test_layers import ROOT, python_files

NAME = re.compile(r"(?<![\w./-])jaxpar(?:\.[A-Za-z_]\w*)+")
IN_PROGRAMS = {"jaxpar.planned"}
"""Prefixes of names in compiled programs."""
FILES = (".pyi", ".py", ".md", ".toml", ".egg-info")

# Walks each name, and takes away first what an earlier walk has left as an attribute.
WALK = """
import json, sys, types
import jaxpar

missing = []
for name in json.load(sys.stdin):
    value = jaxpar
    for part in name.split(".")[1:]:
        found = vars(value).get(part) if isinstance(value, types.ModuleType) else None
        if isinstance(found, types.ModuleType) and found.__name__.startswith("jaxpar."):
            delattr(value, part)
        if part in getattr(value, "__dataclass_fields__", ()):
            break  # An attribute of the instances.
        value = getattr(value, part, missing)
        if value is missing:
            missing.append(name)
            break
print(json.dumps(missing))
"""


def texts() -> Iterator[tuple[str, str]]:
    """(file, text): the pages, and every string of the package and the recipes."""
    for page in PAGES:
        yield page.relative_to(ROOT).as_posix(), page.read_text()
    for file in [*python_files("jaxpar"), *python_files("recipes")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield file.relative_to(ROOT).as_posix(), node.value


@functools.cache
def names() -> dict[str, str]:
    """Each dotted name -> a file that has it."""
    return {
        name: file
        for file, text in texts()
        for name in NAME.findall(text)
        if not name.endswith(FILES) and name not in IN_PROGRAMS
    }


def test_every_name_is_an_attribute_after_import_jaxpar():
    found = names()
    done = subprocess.run(
        [sys.executable, "-c", WALK],
        input=json.dumps(sorted(found)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lost = [f"{found[name]}: {name}" for name in json.loads(done.stdout)]
    assert not lost, "\n".join(lost)


def test_names_are_found_in_pages_docstrings_and_messages():
    found = names()
    assert {"jaxpar.initialize", "jaxpar.step.loss_check"} <= found.keys()
    assert len(found) > 60


def test_every_package_loads_its_modules_when_they_are_used():
    """Also the modules that no page names yet."""
    inits = {file for file in python_files("jaxpar") if file.name == "__init__.py"}
    lacking = [
        file.relative_to(ROOT).as_posix()
        for file in inits - {ROOT / "jaxpar" / "lazy" / "__init__.py"}
        if not file.read_text().endswith("\nload_modules(globals())\n")
    ]
    assert not lacking


def test_name_that_there_is_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'jaxpar.step' has no attribute"):
        _ = jaxpar.step.los_check
    assert not hasattr(jaxpar, "trian")


def test_modules_are_listed_before_they_are_used():
    code = "import json, jaxpar; print(json.dumps([dir(jaxpar), dir(jaxpar.jaxprs)]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    of_jaxpar, of_jaxprs = map(set, json.loads(done.stdout))
    assert of_jaxpar >= {"initialize", "mesh", "step", "__file__"}
    assert "__main__" not in of_jaxpar
    assert of_jaxprs >= {"pieces", "residuals", "__doc__"}


def test_command_is_not_run_by_its_name():
    with pytest.raises(AttributeError, match=r"^module 'jaxpar' has no attribute"):
        _ = jaxpar.__main__


def test_modules_start_no_jax_before_they_are_used():
    code = "import sys, jaxpar; jaxpar.launch.extras; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
