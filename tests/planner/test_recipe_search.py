"""Is a recipe surveyed and searched as it is, and a model that is too large told so?"""

import itertools
import json
from pathlib import Path

import pytest

from jaxpar.cli.recipe_flags import parse
from jaxpar.mesh import MeshShape
from jaxpar.planner.choices import choices
from jaxpar.planner.recipe import load_recipe
from jaxpar.planner.recipe_search import larger_targets, survey_in_subprocess
from tests.commands import complaints, run_jaxpar

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "pretrain.py"
TINY = ("--model", "tiny", "--precision", "bf16", "--batch-size", "16")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("h200:1x2", ["h200:1x4", "h200:1x8", "h200:2x8", "h200:4x8"]),
        ("a100:3x8", ["a100:6x8", "a100:12x8", "a100:24x8", "a100:48x8"]),
        ("v5e:2x4", ["v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16"]),
    ],
)
def test_larger_targets_double_the_devices(target, expected):
    assert list(itertools.islice(larger_targets(target), 4)) == expected


@pytest.fixture(scope="module")
def survey():
    flags = ("--batch-size", "4", "--mesh.pipe", "1", "--zero=1")
    return survey_in_subprocess(RECIPE, "cpu:8", (*TINY, *flags))


def test_survey_counts_what_every_mesh_holds(survey):
    assert (survey.rows, survey.tokens, survey.dtype) == (4, 4 * 256, "bfloat16")
    assert set(survey.facts) == {(8, 1, 1), (4, 1, 2), (2, 1, 4), (1, 1, 8)}
    half, split = survey.facts[4, 1, 2], survey.facts[2, 1, 4]
    psi = half[0].owned
    assert half[0].state == pytest.approx(12 * psi / 2, rel=0.05)
    for zero in (1, 2, 3):
        assert half[zero].state == pytest.approx(12 * psi / 8, rel=0.05)
        assert split[zero].state == pytest.approx(12 * psi / 8, rel=0.05)
    assert split[0].state == pytest.approx(12 * psi / 4, rel=0.05)
    assert split[1].owned == pytest.approx(2 * psi / 4, rel=0.05)
    # Tiny: query, key, value, output, gate, up, down of 4 layers, and the tied ends.
    assert split[1].reduced_per_token == 2 * 128 * (4 * 7 + 1)
    assert 6 < survey.model_flops / psi / survey.tokens < 8


def test_survey_says_why_a_mesh_can_not_be(survey):
    assert "4 rows" in survey.facts[8, 1, 1]


def test_flags_that_are_given_stay(survey):
    assert survey.pinned >= {"zero", "mesh.pipe", "model"}
    assert {choice.zero for choice in choices(survey)} == {1}


def test_recipe_that_is_none_is_said(tmp_path):
    done = run_jaxpar("plan", tmp_path / "none.py", "--target", "h100:1x8", "--search")
    assert done.returncode == 2
    assert "recipe: there is no file" in done.stderr
    assert "Traceback" not in done.stderr


def test_search_on_cpus_is_refused_before_anything_is_traced():
    done = run_jaxpar("plan", RECIPE, "--target", "cpu:8", "--search")
    assert done.returncode == 2
    assert "no rates of CPUs are known" in done.stderr


@pytest.mark.slow
def test_search_ranks_and_a_recipe_takes_the_best(tmp_path):
    file, page = tmp_path / "search.json", tmp_path / "best.html"
    files = ("--json", file, "--html", page)
    flags = ("--", *TINY, "--remat", "none", "--schedule", "1f1b")
    target = ("--target", "h100:1x2", "--compiles", 3)
    done = run_jaxpar("plan", RECIPE, *target, "--search", *files, *flags)
    assert (done.returncode, complaints(done.stderr)) == (0, [])
    found = json.loads(file.read_text())
    seconds = [row["plan"]["estimate"]["step_seconds"] for row in found["ranking"]]
    assert seconds == sorted(seconds)
    assert 1 <= found["compiled"] <= 3
    assert "why the others were excluded" in done.stdout
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_mesh_auto_takes_the_best_of_a_search(capfd):
    recipe = load_recipe(RECIPE)
    given = ["--mesh", "auto", "--target", "h100:1x2", "--accumulate", "2", *TINY]
    config = parse(recipe.Config, None, given)
    assert "--mesh auto: --mesh.data" in capfd.readouterr().out
    shape = config.mesh
    assert isinstance(shape, MeshShape)
    assert shape.data * shape.pipe * shape.tensor == 2
    assert (config.accumulate, config.batch_size) == (2, 16)


@pytest.mark.slow
def test_model_that_is_too_large_is_told_the_smallest_target_that_would_do():
    flags = ("--", "--model", "7b", "--precision", "bf16", "--batch-size", "8")
    done = run_jaxpar("plan", RECIPE, "--target", "h100:1x1", "--search", *flags)
    assert done.returncode == 2
    assert "does not fit h100:1x1 with any choice; the smallest" in done.stderr
    assert "target that fits is h100:1x2" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_plan_that_does_not_fit_shows_what_was_tried():
    flags = ("--model", "1.3b", "--precision", "bf16", "--batch-size", "1024")
    done = run_jaxpar("plan", RECIPE, "--target", "h100:1x8", "--", *flags)
    assert done.returncode == 0
    said = " ".join(done.stdout.split())
    assert "does not fit" in said
    assert "tried to make it fit" in said
    assert "fits" in said.split("tried to make it fit")[1]
