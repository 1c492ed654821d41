"""Does every file fit on a few screens, and every function on one?"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("jaxpar", "kernels_pallas", "recipes", "benchmarks", "tests")

FILE_LINES = 400
RECIPE_LINES = 150
FUNCTION_LINES = 60
KERNEL_LINES = 120

FILES = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def function_limit(name: str) -> int:
    """Return the most lines that a function of the file may have."""
    parts = Path(name).parts
    is_kernel = parts[0] == "kernels_pallas" and parts[-1] == "kernel.py"
    return KERNEL_LINES if is_kernel else FUNCTION_LINES


def function_lines(source: str) -> dict[str, int]:
    """Return the lines of each function, its docstring and decorators left out."""
    lines = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines[f"{node.name}:{node.lineno}"] = (
                node.end_lineno - node.lineno + 1 - _docstring_lines(node)
            )
    return lines


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node, clean=False) is None:
        return 0
    first = node.body[0]
    assert first.end_lineno is not None
    return first.end_lineno - first.lineno + 1


def test_files_are_short():
    found = {name_of(file): len(file.read_text().splitlines()) for file in FILES}
    limits = {True: RECIPE_LINES, False: FILE_LINES}
    long = {
        name: lines
        for name, lines in found.items()
        if lines > limits[name.startswith("recipes/")]
    }
    assert not long, (
        f"split these: over {RECIPE_LINES} (recipes) or {FILE_LINES}: {long}"
    )


def test_functions_are_short():
    long = {
        f"{name_of(file)}:{key}": lines
        for file in FILES
        for key, lines in function_lines(file.read_text()).items()
        if lines > function_limit(name_of(file))
    }
    assert not long, f"functions over {FUNCTION_LINES} or {KERNEL_LINES} lines: {long}"


def test_function_lines_leave_out_the_docstring():
    source = 'def f(x):\n    """One.\n\n    Two.\n    """\n    return x\n'
    assert function_lines(source) == {"f:1": 2}


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("kernels_pallas/adamw/kernel.py", KERNEL_LINES),
        ("kernels_pallas/adamw/api.py", FUNCTION_LINES),
        ("jaxpar/step/train_step.py", FUNCTION_LINES),
    ],
)
def test_function_limit_is_wider_for_kernels_only(name, limit):
    assert function_limit(name) == limit
