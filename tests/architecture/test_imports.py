"""Do the outside libraries and the environment stay where they belong?"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# library: the files that may import it, as patterns from the root
HOMES = {
    "orbax": ("jaxpar/checkpoint/*",),
    "flax": (
        "jaxpar/model/linen.py",
        "jaxpar/model/bridge.py",
        "jaxpar/model/scopes.py",
        "jaxpar/model/step_number.py",
        "jaxpar/models/*",
        "jaxpar/models/*/*",
        "recipes/*",
    ),
    "tensorboardX": ("jaxpar/training/writers.py",),
    "tyro": ("jaxpar/config.py", "jaxpar/cli/*", "recipes/*"),
}
ENVIRONMENT_HOMES = ("jaxpar/launch/*", "jaxpar/planner/*")
# file: the condition under which its use of JAX's internals goes away
JAX_INTERNALS: dict[str, str] = {
    "jaxpar/compiled/host_arguments.py": "jax keeps the memory kinds of absent GPUs",
    "jaxpar/launch/agreement.py": "a public client of the coordination service",
    "jaxpar/launch/gloo.py": "a public setting for the address of CPU collectives",
    "jaxpar/planner/absent_devices.py": "jax issue 23971: lowering elsewhere",
}

TREES = {
    file.relative_to(ROOT).as_posix(): ast.parse(file.read_text())
    for folder in ("jaxpar", "kernels_pallas", "recipes")
    for file in sorted((ROOT / folder).rglob("*.py"))
}


# file: why it may catch any error at all
CATCHES_ALL = {"jaxpar/training/writers.py": "writers are others' programs"}


def is_at_home(name: str, homes: tuple[str, ...]) -> bool:
    return any(Path(name).match(home) for home in homes)


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def environment_uses(tree: ast.AST) -> list[int]:
    """Return the lines that read or change environment variables."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.alias) and node.name in names)
    ]


def broad_handlers(tree: ast.AST) -> list[int]:
    """Return the lines of handlers that catch any error at all."""
    broad = {"Exception", "BaseException"}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or any(
                isinstance(part, ast.Name) and part.id in broad
                for part in ast.walk(node.type)
            )
        )
    ]


def internals_uses(tree: ast.AST) -> list[int]:
    """Return the lines that name a private module of JAX."""
    found = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any("jax._src" in name for name in imports(node))
    ]
    return found + [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax._src"
    ]


def test_libraries_are_imported_at_home():
    wrong = [
        f"{name} imports {library}, which only {HOMES[library]} may"
        for name, tree in TREES.items()
        for library in {module.split(".")[0] for module in imports(tree)} & set(HOMES)
        if not is_at_home(name, HOMES[library])
    ]
    assert not wrong, wrong


def test_environment_is_read_at_home():
    found = {name: environment_uses(tree) for name, tree in TREES.items()}
    wrong = [
        f"{name} uses os.environ at lines {lines}; only {ENVIRONMENT_HOMES} may"
        for name, lines in found.items()
        if lines and not is_at_home(name, ENVIRONMENT_HOMES)
    ]
    assert not wrong, wrong


def test_handlers_name_the_errors_they_expect():
    found = {name: broad_handlers(tree) for name, tree in TREES.items()}
    wrong = {name: lines for name, lines in found.items() if lines}
    assert all(len(wrong.pop(name, ())) == 1 for name in CATCHES_ALL)
    assert not wrong, f"these lines catch every error: {wrong}"


def test_jax_internals_are_listed():
    found = {name: internals_uses(tree) for name, tree in TREES.items()}
    using = {name: lines for name, lines in found.items() if lines}
    assert using.keys() == JAX_INTERNALS.keys(), using


@pytest.mark.parametrize(
    ("finder", "source", "lines"),
    [
        (environment_uses, "import os\nos.environ['A']\nos.getenv('B')", [2, 3]),
        (environment_uses, "from os import environ", [1]),
        (environment_uses, "import os\nos.path", []),
        (broad_handlers, "try:\n    f()\nexcept Exception:\n    pass", [3]),
        (broad_handlers, "try:\n    f()\nexcept (OSError, Exception):\n    pass", [3]),
        (broad_handlers, "try:\n    f()\nexcept:\n    pass", [3]),
        (broad_handlers, "try:\n    f()\nexcept OSError:\n    pass", []),
        (internals_uses, "from jax._src import core", [1]),
        (internals_uses, "import jax\njax._src.core.x", [2]),
        (internals_uses, "import jax\njax.lax.psum", []),
    ],
)
def test_finders_find_what_they_name(finder, source, lines):
    assert finder(ast.parse(source)) == lines
