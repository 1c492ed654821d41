"""Is the text that rich prints had everywhere, a notebook too?"""

import builtins

import pytest
from rich.console import Console
from rich.table import Table

from jaxpar.compiled.plain_text import as_plain_text
from jaxpar.planner.plan_text import as_text
from tests.compiled.test_explain import explained
from tests.planner.handmade import make_plan


@pytest.fixture
def in_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rich sees it: IPython's shell that sends messages to a notebook."""
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    assert Console().is_jupyter


def print_table(console: Console) -> None:
    table = Table("one", "two")
    table.add_row("1", "[bold]2")
    console.print(table)


@pytest.mark.usefixtures("in_notebook")
def test_text_of_a_notebook_is_not_empty() -> None:
    assert "two" in as_plain_text(print_table)
    assert "params/" in explained(3)[0].details
    assert "ZeRO" in as_text(make_plan())


def test_width_is_that_given() -> None:
    lines = as_plain_text(lambda console: console.rule(), width=17).splitlines()
    assert list(map(len, lines)) == [17]
