"""Do imports point downward only, by the map of the layers?"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A file imports from lower layers or from its own folder. An entry is a file or a
# folder of jaxpar/; a layer is as low as what its entries are built on allows.
LAYERS = (
    (
        "types",
        "compat",
        "jaxprs",
        "one_thread",
        "residuals",
        "exit_codes",
        "plotting",
        "tensors",
    ),
    ("tree", "dependence", "draws"),
    ("mesh", "row_draws", "replicas", "stopping", "watch"),
    ("sharding", "inputs", "metrics", "launch", "xla_settings"),
    ("pace", "goodput", "linen", "placing"),
    (
        "batches",
        "data",
        "layer_drop",
        "loss_scale",
        "module",
        "offload",
        "optim",
        "precision",
        "remat_policy",
        "sparse_attention",
        "weighted",
    ),
    ("axis_names", "parts"),
    ("models", "state", "deferred"),
    ("loss",),
    ("loss_check",),
    ("gradients",),
    ("step", "checkpoint", "checks"),
    ("pipeline", "profile", "compress", "infer"),
    ("plan",),
    ("config", "layout", "run_ahead", "state_view"),
    ("compiled_step", "program"),
    ("engine",),
    ("initialization",),
    ("run", "planner", "environment", "testing"),
    ("searcher", "training"),
    ("cli_ckpt", "cli_launch", "cli_layout", "cli_plan"),
    ("cli",),
    ("__init__", "__main__"),
)
LAYER = {unit: level for level, units in enumerate(LAYERS) for unit in units}

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


def test_units_of_jaxpar_are_in_the_map():
    unknown = {unit_of(file) for file in python_files("jaxpar")} - set(LAYER)
    assert not unknown, f"add {sorted(unknown)} to LAYERS, in the layer they belong to"


@pytest.mark.parametrize(
    "file", python_files("jaxpar"), ids=lambda file: str(file.relative_to(ROOT))
)
def test_imports_of_jaxpar_point_downward(file):
    unit = unit_of(file)
    assert unit in LAYER, f"add {unit} to LAYERS, in the layer it belongs to"
    found = [violation(unit, name) for name in imported_modules(file.read_text())]
    upward = [line for line in found if line]
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
        ("engine", "jaxpar.step.make_step", True),
        ("sharding", "jaxpar.sharding.zero.STAGES", True),
        ("mesh", "jaxpar.sharding.rules", False),
        ("step", "jaxpar.engine", False),
        ("step", "jaxpar.initialize", False),
        ("__init__", "jaxpar.engine", True),
        ("types", "numpy", True),
    ],
)
def test_violation_tells_downward_from_upward(unit, name, allowed):
    assert (violation(unit, name) is None) == allowed
