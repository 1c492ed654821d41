"""How do your own tests check a training step's budget: a pytest plug-in.

Load it in a ``conftest.py`` at the root of your tests::

    pytest_plugins = ["jaxpar.testing"]

and check an engine's step against the stored budget::

    def test_step_of_the_large_model(within_budget):
        within_budget(make_engine())

``pytest --update-budgets`` writes the files, ``budgets/<test>.json`` beside the test,
for you to read and commit; plain ``pytest`` compares. Record on the platform and the
mesh that you compare on.
"""

import re
from collections.abc import Callable

import pytest

from jaxpar.compiled.budget import Budget
from jaxpar.engine.engine import Engine


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--update-budgets``."""
    parser.getgroup("jaxpar").addoption(
        "--update-budgets",
        action="store_true",
        help="write the budgets of steps to budgets/ instead of comparing",
    )


@pytest.fixture
def within_budget(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Check an engine's step against the stored budget.

    Returns:
      ``within_budget(engine, name=None)``; `name` is the file's name, by default the
      test's: for two engines in a test, and tests of one name in a folder.
    """
    folder = request.path.parent / "budgets"
    used: set[str] = set()

    def hold(engine: Engine, name: str | None = None) -> None:
        __tracebackhide__ = True
        stem = re.sub(r"[^\w.]+", "-", name or request.node.name).strip("-")
        if stem in used:
            raise ValueError(
                f"within_budget: name={stem!r} is already used in this test; give "
                "each engine its own name."
            )
        used.add(stem)
        path = folder / f"{stem}.json"
        if request.config.getoption("--update-budgets"):
            folder.mkdir(exist_ok=True)
            path.write_text(engine.budget().as_json() + "\n")
        elif path.is_file():
            engine.verify(Budget.from_json(path.read_text()))
        else:
            pytest.fail(
                f"within_budget: there is no {path}. Run pytest --update-budgets to "
                "write the step's budget; review it, and commit it.",
                pytrace=False,
            )

    return hold
