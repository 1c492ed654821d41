"""Does `jaxpar plan` plan a recipe as it is, and say what is wrong with what it got?"""

import json
from pathlib import Path

import pytest

from jaxpar.mesh import MeshShape
from jaxpar.planner.recipe import load_recipe, mesh_on
from jaxpar.planner.targets import parse_target
from tests.commands import complaints, run_jaxpar

ROOT = Path(__file__).resolve().parents[2]


def test_complaints_are_what_is_no_progress():
    said = "compiling pretrain.py for cpu:16\ncompiling pretrain.py for cpu:16: 14 s\n"
    assert complaints(said) == []
    bad = [
        "UserWarning: compiling pretrain.py for cpu:16",
        "compiling pretrain.py failed",
        "",
    ]
    assert complaints(said + "\n".join([*bad, ""])) == bad


def test_recipe_is_planned_with_its_own_flags(tmp_path):
    """A model that this machine could not hold, on more devices than it has."""
    file = tmp_path / "plan.json"
    done = run_jaxpar(
        *("plan", "recipes/pretrain.py", "--target", "cpu:16", "--json", file, "--"),
        *("--model", "7b", "--mesh.tensor", 2, "--batch-size", 16, "--zero", 2),
    )
    assert (done.returncode, complaints(done.stderr)) == (0, [])
    found = json.loads(file.read_text())
    assert found["mesh"] == {"data": 8, "pipe": 1, "tensor": 2}
    assert found["num_params"] > 6.5e9
    assert found["tokens_per_step"] == 16 * 4096
    state = found["bytes_per_device"]["state"]
    assert state == pytest.approx(12 * found["num_params"] / 16, rel=2e-3)
    assert "cpu:16: 16 devices; data 8 x pipe 1 x tensor 2; ZeRO 2" in done.stdout
    for part in ("optimizer state", "sends in a step", "matmul FLOPs"):
        assert part in done.stdout


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, r"recipe: there is no file"),
        ("def build(config): ...", "has no Config; a recipe has a dataclass Config"),
        ("class Config: ...", "has no build; a recipe has a dataclass Config, every"),
    ],
)
def test_file_that_is_no_recipe_is_told_what_one_is(tmp_path, source, message):
    path = tmp_path / "recipe.py"
    if source:
        path.write_text(source)
    with pytest.raises(ValueError, match=message):
        load_recipe(path)


def test_mesh_that_does_not_fit_the_target_is_refused():
    done = run_jaxpar(
        *("plan", "recipes/pretrain.py", "--target", "cpu:8", "--"),
        *("--mesh.tensor", 3),
    )
    assert done.returncode == 2
    assert "needs a multiple of 3 devices, but there are 8" in done.stderr
    assert "Traceback" not in done.stderr


def test_mesh_of_some_of_the_target_is_refused():
    """A plan is of all that is paid for; a run may leave devices idle."""
    target = parse_target("cpu:8")
    assert mesh_on(target, MeshShape(tensor=2)).size == 8
    with pytest.raises(ValueError, match="needs 2 devices, but there are 8"):
        mesh_on(target, MeshShape(data=2))


def test_flags_behind_dashes_are_for_plan_alone():
    done = run_jaxpar(
        "schedule", "1f1b", "--stages", 2, "--microbatches", 2, "--", "--x"
    )
    assert done.returncode != 0
    assert "only plan and launch take flags after --" in done.stderr
