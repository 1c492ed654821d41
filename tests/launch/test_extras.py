"""Is a missing package refused in a line that says who needs it and what to install?"""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from jaxpar.launch.extras import PACKAGES, import_extra, pip_install

ROOT = Path(__file__).resolve().parents[2]


def extras() -> dict[str, list[str]]:
    """The extras of the package, with the names of what they install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        extra: [re.match(r"[\w-]+", line)[0] for line in lines]
        for extra, lines in project["optional-dependencies"].items()
    }


@pytest.mark.parametrize("module", PACKAGES)
def test_extra_of_a_package_installs_it(module):
    package, extra = PACKAGES[module]
    assert package in extras()[extra]


def test_nothing_else_reports_a_missing_package():
    """But for compilers, which are of no package that jaxpar imports."""
    found = {
        file.relative_to(ROOT / "jaxpar").as_posix()
        for file in (ROOT / "jaxpar").rglob("*.py")
        if "raise ModuleNotFoundError" in file.read_text()
    }
    assert found == {"launch/extras.py", "planner/absent_devices.py"}


def test_package_that_is_there_is_imported():
    assert import_extra("matplotlib.figure", "--png").__name__ == "matplotlib.figure"


@pytest.mark.parametrize(
    ("module", "flag", "line"),
    [
        ("tensorboardX", "--tensorboard", "tensorboardX.*'jaxpar[tensorboard]'"),
        ("matplotlib.figure", "--png", "matplotlib.*'jaxpar[plot]'"),
        ("ray", "`jaxpar launch ray`", "ray.*'jaxpar[ray]'"),
    ],
)
def test_missing_package_names_the_flag_and_the_extra(module, flag, line, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    package, remedy = line.split(".*")
    said = f"{flag} needs {package}, which is not installed: pip install {remedy}"
    with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(said)}$"):
        import_extra(module, flag)


def test_package_that_is_broken_says_why(tmp_path, monkeypatch):
    """As one built for another Python, or without a package of its own."""
    (tmp_path / "tensorboardX.py").write_text("import a_package_of_its_own")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorboardX", raising=False)
    said = (
        r"^--tensorboard needs tensorboardX, which can't be imported \(No module named "
        r"'a_package_of_its_own'\): pip install 'jaxpar\[tensorboard\]'$"
    )
    with pytest.raises(ModuleNotFoundError, match=said):
        import_extra("tensorboardX", "--tensorboard")


def test_command_that_installs_an_extra_is_quoted_for_the_shell():
    assert pip_install("plan-gpu") == "pip install 'jaxpar[plan-gpu]'"
