"""Is a worker that differs named, with what differs?"""

import sys
import types
from pathlib import Path

import pytest

from jaxpar.launch.agreement import differences, own_code, require_same


def facts(**changes) -> dict:
    found = {
        "config": {"steps": 10, "seed": 0},
        "data": {"corpus_sha256": "ab"},
        "code": {"of the script": "12"},
        "versions": {"jax": "0.11.2"},
        "host": "node1",
    }
    for part, change in changes.items():
        found[part] = found[part] | change if isinstance(change, dict) else change
    return found


def test_same_workers_on_other_hosts_agree() -> None:
    assert differences([facts(), facts(host="node2")]) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"config": {"steps": 11}}, "config steps is 11, not 10"),
        ({"data": {"corpus_sha256": "cd"}}, "data corpus_sha256 is 'cd', not 'ab'"),
        ({"code": {"mine": "x"}}, "code mine is 'x', not None"),
        ({"versions": {"jax": "0.10.2"}}, "versions jax is '0.10.2', not '0.11.2'"),
    ],
)
def test_the_one_that_differs_from_most_is_named(change: dict, told: str) -> None:
    """Even where it is the first."""
    odd = facts(host="node9", **change)
    assert differences([odd, facts(), facts()]) == [f"worker 0 (node9): {told}"]
    assert differences([facts(), facts(), odd]) == [f"worker 2 (node9): {told}"]


def test_many_differences_are_counted() -> None:
    config = {f"field{i}": i for i in range(9)}
    (line,) = differences([facts(), facts(), facts(config=config)])
    assert line.count(" is ") == 3
    assert line.endswith("and 6 more")


def test_code_is_the_programs_own_and_changes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("x = 1")
    module = types.ModuleType("mine")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "mine", module)
    first = own_code()
    assert "mine" in first
    assert not {"json", "jax", "numpy"} & set(first), "told by versions"
    file.write_text("x = 2")
    second = own_code()
    assert first["mine"] != second["mine"]
    assert first | {"mine": ""} == second | {"mine": ""}


def test_one_process_agrees_with_itself() -> None:
    require_same({"a": 1}, {})
