"""Do the examples of README and docs run as they are printed, one after the other?"""

import contextlib
import io
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

from jaxpar.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted(
    page for page in (ROOT / "docs").glob("*.md") if "```python" in page.read_text()
)
MANY_HOSTS = ROOT / "docs" / "many_hosts.md"
FIRST_STEP = "metrics = engine.step(batch)"


@pytest.fixture(autouse=True)
def started_devices() -> None:
    """All of them: an example that asks for four would be the first to ask."""
    jax.devices()


def examples(page: Path) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.M)
    return [textwrap.dedent(text) for text in found]


def run(page: Path, texts: list[str], **scope: object) -> str:
    """What the examples of a page print."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names = {"__name__": "x", **scope}
        for text in texts:
            exec(compile(text, str(page), "exec"), names)
    return printed.getvalue()


def test_readme_example_runs_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = examples(README)
    assert source.count(FIRST_STEP) == 1
    # The loss of the first step, which the example does not print.
    told = source.replace(FIRST_STEP, f"{FIRST_STEP}; losses.append(metrics['loss'])")
    monkeypatch.chdir(tmp_path)
    losses: list[float] = []
    printed = run(README, [told], losses=losses)
    match = re.search(r"^loss (\d+\.\d+)$", printed, re.M)
    assert match, printed
    assert float(match[1]) == pytest.approx(float(losses[-1]), abs=1e-3)
    assert float(match[1]) < 0.5 * float(losses[0])
    assert list((tmp_path / "runs/mine").glob("step_*")), "it saves a checkpoint"
    assert "a device stores" in printed, "it explains what a device stores"


def test_second_example_of_the_readme_prints_the_bytes_that_it_says() -> None:
    """The engine's lines are put in the place of the first example's."""
    first, second = examples(README)
    model, engine, _ = first.partition("engine = ")
    assert engine
    lines = run(README, [model, second]).splitlines()
    stage, said = "ZeRO {}: {} bytes a device", r"prints ([\d,]+) bytes .* and ([\d,]+)"
    (numbers,) = re.findall(said, README.read_text())
    assert lines == [stage.format(0, numbers[0]), stage.format(3, numbers[1])]


def test_devices_of_the_second_example_are_made_in_a_new_process() -> None:
    """In a new process: nothing before it asks for devices."""
    first, second = examples(README)
    model = first.partition("engine = ")[0]
    program = model + second.partition("for zero")[0] + "print(len(devices))"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page begins with a model that its reader might have written.

    But for the page of models that others have written.
    """
    monkeypatch.chdir(tmp_path)
    texts = examples(page)
    assert ("(nnx.Module):" in texts[0]) == (page.stem != "models")
    run(page, texts)


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.M)
    links = re.findall(r"\]\(([^)#:]+)\)", prose)
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def launches() -> list[str]:
    found = re.findall(
        r"^\.venv/bin/jaxpar (launch .*?)(?:  +#.*)?$", MANY_HOSTS.read_text(), re.M
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
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["jaxpar", "launch", where, *given])
    main(["launch", where, *dry, *given])
    printed = capsys.readouterr().out
    assert "recipes/pretrain.py" in printed + "".join(
        path.read_text() for path in tmp_path.iterdir()
    )
