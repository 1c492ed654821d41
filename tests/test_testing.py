"""Does the pytest plug-in write budgets, compare with them, and say what is missing?"""

import json

import pytest

from jaxpar import testing

pytest_plugins = ["pytester"]

TEST = """
import jax, jax.numpy as jnp, numpy as np, optax, pytest
from flax import nnx
import jaxpar

def make_engine(width):
    return jaxpar.initialize(
        model=lambda rngs: nnx.Linear(width, width, rngs=rngs),
        loss_fn=lambda model, batch: jnp.mean(model(batch) ** 2),
        optimizer=optax.sgd(0.1),
        sample_batch=jax.ShapeDtypeStruct((8, width), np.float32),
    )

@pytest.mark.parametrize("zero", [1])
def test_step(within_budget, zero):
    within_budget(make_engine(WIDTH))
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    # Imported here as well: what is first imported inside, a run inside forgets.
    pytester.makeconftest(f"pytest_plugins = [{testing.__name__!r}]")
    pytester.makepyfile(test_train=TEST.replace("WIDTH", "256"))
    return pytester


def run(project: pytest.Pytester, *args: str) -> pytest.RunResult:
    return project.runpytest_inprocess("-p", "no:xdist", *args)


def test_budget_that_is_missing_is_asked_for(project):
    result = run(project)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*within_budget: there is no *budgets/test_step-1.json. Run pytest --update-*"]
    )


def test_budget_is_written_held_to_and_exceeded_by_a_larger_model(project):
    run(project, "--update-budgets").assert_outcomes(passed=1)
    file = project.path / "budgets" / "test_step-1.json"
    written = json.loads(file.read_text())
    assert written["communicated"]["data"]["all-gather"] == 256 * 257 * 4
    run(project).assert_outcomes(passed=1)
    project.makepyfile(test_train=TEST.replace("WIDTH", "512"))
    result = run(project)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*data: all-gather moves 1,050,624 bytes a step, *"])
    assert json.loads(file.read_text()) == written


def test_two_engines_of_a_test_need_names(project):
    again = '    within_budget(make_engine(8), "small one")\n'
    project.makepyfile(test_train=TEST.replace("WIDTH", "256") + again)
    run(project, "--update-budgets").assert_outcomes(passed=1)
    names = sorted(file.name for file in (project.path / "budgets").iterdir())
    assert names == ["small-one.json", "test_step-1.json"]
    again = "    within_budget(make_engine(8))\n"
    project.makepyfile(test_train=TEST.replace("WIDTH", "256") + again)
    result = run(project, "--update-budgets")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*within_budget: name='test_step-1' is already used in this test; give *"]
    )
