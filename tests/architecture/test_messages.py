"""Is there every argument and every flag that a message names?

A remedy that there is not costs its reader more than none.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxpar
from jaxpar.cli.main import COMMANDS
from tests.architecture.test_layers import ROOT, python_files
from tests.architecture.test_names import names

ARGUMENT = re.compile(r"(?<![\w.\-/{}'\[])([a-z_]\w*)=(?![=\"])")
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z-]*(?:\.[a-z][a-z-]*)*)")

MARKUP = {
    "jaxpar/show/hover.py",
    "jaxpar/show/page.py",
    "jaxpar/show/plan_page.py",
    "jaxpar/show/run_style.py",
}
"""Files whose strings are of pages, where two dashes begin a variable of CSS."""

CALLED_DIRECTLY = (
    "jaxpar/checkpoint/exports.py",
    "jaxpar/training/gradient_noise.py",
    "jaxpar/training/metrics.py",
    "kernels_pallas/*/*.py",
)
"""Files whose own functions users call: a message may name what those take."""

OF_OTHERS = {
    "constraint": "Slurm's",
    "from-file": "kubectl's",
    "grad": "optax's",
    "help": "every command's",
    "line": "the text of a compiled program",
    "linesearch": "optax's",
    "no-deps": "pip's",
    "ntasks-per-node": "Slurm's",
    "open-mode": "Slurm's",
    "output": "Slurm's",
    "parent_frame_id": "the text of a compiled program",
    "requeue": "Slurm's",
    "rows": "of a loader's state",
    "sharding": "jax's",
    "traceback": "of every recipe: jaxpar.cli.recipe_flags",
}
"""Arguments and flags that are no setting of ours -> whose they are."""


@functools.cache
def trees() -> dict[str, ast.Module]:
    folders = "jaxpar", "kernels_pallas", "recipes"
    return {
        file.relative_to(ROOT).as_posix(): ast.parse(file.read_text())
        for folder in folders
        for file in python_files(folder)
    }


def sentences(tree: ast.Module) -> Iterator[str]:
    """The strings of a file that have words, but for docstrings."""
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        text = None
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in node.values}
            parts = (getattr(part, "value", "{}") for part in node.values)
            text = "".join(part if isinstance(part, str) else "{}" for part in parts)
        elif isinstance(node, ast.Constant) and id(node) not in inner:
            text = node.value
        if isinstance(text, str) and " " in text:
            yield text


def taken(value: typing.Any) -> Iterator[str]:
    """What a public function, class or module takes."""
    if inspect.ismodule(value):
        for name in getattr(value, "__all__", ()):
            yield from taken(getattr(value, name))
    elif inspect.isclass(value):
        yield from getattr(value, "__annotations__", ())
        for name, method in inspect.getmembers(value, callable):
            if not name.startswith("_") or name in ("__init__", "__call__"):
                yield from _parameters(method)
    elif callable(value):
        yield from _parameters(value)


def _parameters(called: typing.Any) -> Iterator[str]:
    with contextlib.suppress(ValueError, TypeError):  # Of C, without a signature.
        yield from inspect.signature(called).parameters


@functools.cache
def arguments() -> set[str]:
    """The arguments of all that users call: public names, and those of the pages.

    A recipe's config is an argument of `jaxpar.open_run`.
    """
    found = {*taken(jaxpar), *(name.replace("-", "_") for name in recipe_flags())}
    for name in names():
        value = functools.reduce(_attribute, name.split(".")[1:], jaxpar)
        found |= set() if inspect.ismodule(value) else {*taken(value)}
    return found


def _attribute(value: typing.Any, name: str) -> typing.Any:
    return getattr(value, name, None)


def own_arguments(file: str) -> set[str]:
    """The arguments of the functions of a file, and the fields of its classes."""
    nodes = list(ast.walk(trees()[file]))
    taken = {node.arg for node in nodes if isinstance(node, ast.arg)}
    fields = (node for node in nodes if isinstance(node, ast.AnnAssign))
    return taken | {ast.unparse(node.target) for node in fields}


def flags_of(annotation: typing.Any) -> Iterator[str]:
    """The names of the flags that tyro makes of a dataclass, and of those in it."""
    for own in (annotation, *typing.get_args(annotation)):
        if not (isinstance(own, type) and dataclasses.is_dataclass(own)):
            yield from flags_of(own) if own is not annotation else ()
            continue
        for name, hint in typing.get_type_hints(own, include_extras=True).items():
            given = (getattr(each, "name", None) for each in _metadata(hint))
            yield from (name.replace("_", "-"), *filter(None, given))
            yield from flags_of(hint)


def _metadata(hint: typing.Any) -> tuple:
    return getattr(hint, "__metadata__", ())


def recipe_flags() -> Iterator[str]:
    for file in python_files("recipes"):
        recipe = importlib.import_module(f"recipes.{file.stem}")
        yield from flags_of(recipe.Config)


@functools.cache
def flags() -> set[str]:
    """The flags of the command, of the recipes and of the plugin of pytest."""
    options = re.findall(r'addoption\(\s*"--([a-z-]+)"', _source("jaxpar/testing.py"))
    others = re.findall(r'_taken\(\w+, "--([a-z-]+)"', _source("jaxpar/config.py"))
    commands = (flag for kind, _ in COMMANDS.values() for flag in flags_of(kind))
    return {*options, *others, *commands, *recipe_flags()}


def _source(file: str) -> str:
    return (ROOT / file).read_text()


def named(pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """(file, name) of what messages name, but for what is others'."""
    for file, tree in trees().items():
        for text in sentences(tree) if file not in MARKUP else ():
            yield from ((file, x) for x in pattern.findall(text) if x not in OF_OTHERS)


def test_arguments_that_messages_name_exist():
    lost = {
        f"{file}: {name}"
        for file, name in named(ARGUMENT)
        if name not in arguments()
        and not (is_called_directly(file) and name in own_arguments(file))
    }
    assert not lost, "\n".join(sorted(lost))


def is_called_directly(file: str) -> bool:
    return any(Path(file).match(pattern) for pattern in CALLED_DIRECTLY)


def test_flags_that_messages_name_exist():
    known = flags()
    lost = {
        f"{file}: --{name}"
        for file, name in named(FLAG)
        if not {part.removeprefix("no-") for part in name.split(".")} <= known
    }
    assert not lost, "\n".join(sorted(lost))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('raise ValueError("pass force=True.")', ["force"]),
        ('warn(f"mesh: {n} rows; set zero={z!r}, or " "give accumulate=.")',
         ["zero", "accumulate"]),
        ('"""A docstring of force=True."""', []),
        ('x = "a == b; not /c=d, {}=2 or <p class=\\"e\\">"', []),
    ],
)  # fmt: skip
def test_arguments_are_found_in_sentences(source, found):
    texts = sentences(ast.parse(source))
    assert [name for text in texts for name in ARGUMENT.findall(text)] == found


def test_flags_are_found_with_their_prefix():
    assert FLAG.findall("--batch.gpus 2 is wrong (--no-fix): a --- b") == [
        "batch.gpus",
        "no-fix",
    ]
    assert {"batch", "gpus", "sbatch", "seq-len", "tensor", "writers"} <= flags()


def test_remedy_that_there_is_not_would_be_found():
    assert "force" not in arguments()
    assert "forse" not in flags()
