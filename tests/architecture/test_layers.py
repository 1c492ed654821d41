"""Do imports point downward only, by the map of the layers?"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A file imports from lower layers or from its own folder. An entry is a file or a
# folder of jaxpar/; a layer is as low as what its entries are built on allows.
LAYERS = (
    ("types", "mesh", "config", "progress", "lazy"),
    ("tree", "jaxprs", "launch"),
    ("sharding", "sparse_attention", "data"),
    ("model",),
    ("step",),
    ("optim", "offload", "pipeline", "checkpoint", "losses", "compiled"),
    ("engine", "models"),
    ("planner", "training", "testing"),
    ("show",),
    ("cli",),
)
DOORS = ("__init__", "__main__")
"""Above all layers: they import whatever a user asks for."""

MOST_LAYERS, MOST_LOOSE_FILES = 10, 6

LAYER = {unit: level for level, units in enumerate((*LAYERS, DOORS)) for unit in units}

PACKAGES = {"jaxpar", "kernels_pallas", "recipes", "benchmarks", "tests"}
# What each top-level folder may import of the others.
MAY_IMPORT = {
    "jaxpar": {"jaxpar", "kernels_pallas"},
    "kernels_pallas": {"kernels_pallas"},
    "recipes": {"jaxpar"},
    "benchmarks": {"jaxpar", "kernels_pallas", "recipes", "benchmarks"},
}


def imported_modules(source: str) -> Iterator[str]:
    """Yield each imported name in full: `from a import b` is a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import by the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unit_of(file: Path) -> str:
    """Return the entry of LAYERS that a file of jaxpar/ belongs to."""
    return file.relative_to(ROOT / "jaxpar").parts[0].removesuffix(".py")


def violation(unit: str, name: str) -> str | None:
    """Say why a file of `unit` must not import `name`, or return None."""
    parts = name.split(".")
    if parts[0] != "jaxpar":
        return None
    target = parts[1] if len(parts) > 1 else "__init__"
    if target not in LAYER and not _is_module(target):
        target = "__init__"  # a public name: `from jaxpar import MeshShape`
    if target == unit or LAYER.get(target, -1) < LAYER[unit]:
        return None
    return (
        f"{unit} (layer {LAYER[unit]}) imports {name} of {target} "
        f"(layer {LAYER[target]})"
    )


def _is_module(unit: str) -> bool:
    folder = ROOT / "jaxpar"
    return (folder / f"{unit}.py").exists() or (folder / unit).is_dir()


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_layers_name_each_unit_once():
    units = [unit for layer in LAYERS for unit in layer]
    assert len(units) == len(set(units))


def test_map_is_of_the_units_that_there_are():
    units = {unit_of(file) for file in python_files("jaxpar")}
    assert units == set(LAYER), "LAYERS names each unit, and nothing that is not there"


def test_layers_and_loose_files_are_few():
    loose = {file.stem for file in (ROOT / "jaxpar").glob("*.py")} - set(DOORS)
    assert len(LAYERS) <= MOST_LAYERS
    assert len(loose) <= MOST_LOOSE_FILES, sorted(loose)


def class_names(source: str) -> list[str]:
    return [n.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)]


def test_no_class_name_stands_twice_in_the_package():
    names = [
        name for f in python_files("jaxpar") for name in class_names(f.read_text())
    ]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"give {sorted(twice)} names of their own"


def named_modules(source: str) -> Iterator[str]:
    """Yield the modules of jaxpar that strings name, documentation apart."""
    module = ast.parse(source)
    texts = {
        id(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(module):
        if not isinstance(node, ast.Constant) or id(node) in texts:
            continue
        if isinstance(node.value, str):
            yield from re.findall(r"(?<![\w./])jaxpar\.[a-z_.]+", node.value)


def test_no_string_names_a_module_of_a_higher_layer():
    upward = {
        file.relative_to(ROOT).as_posix(): line
        for file in python_files("jaxpar")
        for name in named_modules(file.read_text())
        if _is_named(name) and (line := violation(unit_of(file), name))
    }
    assert not upward, upward


def _is_named(name: str) -> bool:
    """Whether a dotted name is of a module, and not of a public function."""
    parts = name.split(".")
    return len(parts) > 1 and _is_module(parts[1])


def test_strings_that_name_modules_are_found():
    source = 'call("jaxpar.planner.recipe:plan", "jaxpar.mesh")\n"""jaxpar.engine"""'
    assert list(named_modules(source)) == ["jaxpar.planner.recipe", "jaxpar.mesh"]


def test_imports_of_jaxpar_point_downward():
    upward = {
        file.relative_to(ROOT).as_posix(): line
        for file in python_files("jaxpar")
        for name in imported_modules(file.read_text())
        if (line := violation(unit_of(file), name))
    }
    assert not upward, upward


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_folders_import_only_what_they_may(folder):
    forbidden = PACKAGES - MAY_IMPORT[folder]
    for file in python_files(folder):
        names = {name.split(".")[0] for name in imported_modules(file.read_text())}
        assert not names & forbidden, f"{file.relative_to(ROOT)}: {names & forbidden}"


@pytest.mark.parametrize(
    ("unit", "name", "allowed"),
    [
        ("tree", "jaxpar.types.PyTree", True),
        ("engine", "jaxpar.step.train_step.make_step", True),
        ("sharding", "jaxpar.sharding.zero.STAGES", True),
        ("mesh", "jaxpar.sharding.rules", False),
        ("step", "jaxpar.engine.engine", False),
        ("step", "jaxpar.initialize", False),
        ("__init__", "jaxpar.engine.engine", True),
        ("types", "numpy", True),
    ],
)
def test_violation_tells_downward_from_upward(unit, name, allowed):
    assert (violation(unit, name) is None) == allowed
