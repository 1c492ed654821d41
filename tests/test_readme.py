"""Do the README's examples run as they are printed, one after the other?"""

import contextlib
import io
import re
import sys
import textwrap
from pathlib import Path

import pytest

from jaxpar.cli.main import main

README = Path(__file__).resolve().parents[1] / "README.md"
FIRST_STEP = "metrics = engine.step(batch)"


def examples() -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.M)
    return [textwrap.dedent(text) for text in found]


def test_readme_examples_run_and_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, *others = examples()
    assert source.count(FIRST_STEP) == 1
    assert others
    # The loss of the first step, which the example does not print.
    told = source.replace(FIRST_STEP, f"{FIRST_STEP}; losses.append(metrics['loss'])")
    monkeypatch.chdir(tmp_path)
    losses: list[float] = []
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        scope = {"losses": losses, "__name__": "x"}
        for text in (told, *others):
            exec(compile(text, str(README), "exec"), scope)
    match = re.search(r"^loss (\d+\.\d+)$", printed.getvalue(), re.M)
    assert match, printed.getvalue()
    assert float(match[1]) == pytest.approx(float(losses[-1]), abs=1e-3)
    assert float(match[1]) < 0.5 * float(losses[0])
    assert list((tmp_path / "runs/mine").glob("step_*")), "it saves a checkpoint"
    assert "kernel" in printed.getvalue(), "it explains where leaves rest"


def launches() -> list[str]:
    found = re.findall(
        r"^\.venv/bin/jaxpar (launch .*?)(?:  +#.*)?$", README.read_text(), re.M
    )
    told = ("local", "slurm", "ray", "k8s")
    return [line for line in found if line.split()[1] in told]


@pytest.mark.parametrize("line", launches())
def test_readme_launches_are_what_the_command_takes(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Printed or written, not started."""
    where, *words = line.split()[1:]
    given = [f"{tmp_path}/job.sh" if word == "job.sh" else word for word in words]
    dry = [] if where == "k8s" else ["--dry-run"]
    monkeypatch.chdir(README.parent)
    monkeypatch.setattr(sys, "argv", ["jaxpar", "launch", where, *given])
    main(["launch", where, *dry, *given])
    printed = capsys.readouterr().out
    assert "recipes/gpt.py" in printed + "".join(
        path.read_text() for path in tmp_path.iterdir()
    )
