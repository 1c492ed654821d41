"""Do the recipes travel in the wheel, and are they listed and copied from there?"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxpar.cli.main import main
from tests.commands import ROOT

RECIPES = {file.stem: file for file in sorted((ROOT / "recipes").glob("*.py"))}
BUILD = "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
# What a checkout has that the wheel is made of.
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
PACKAGES = ("jaxpar", "kernels_pallas", "recipes")


def refused(capsys, *args) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["recipes", *map(str, args)])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_recipes_are_listed_with_what_they_do(capsys):
    main(["recipes", "list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    said = dict(line.split(maxsplit=1) for line in lines)
    assert said["pretrain"] == (
        "Train a GPT on the source of Python's standard library, sharded."
    )


def test_recipe_is_copied_as_it_is_into_a_folder_that_is_made(capsys, tmp_path):
    main(["recipes", "copy", "pretrain", str(tmp_path / "own")])
    copied = tmp_path / "own" / "pretrain.py"
    assert copied.read_text() == RECIPES["pretrain"].read_text()
    assert [file.name for file in copied.parent.iterdir()] == ["pretrain.py"]
    assert capsys.readouterr().out == (
        f"{copied}: `python {copied} --help` lists its flags\n"
    )


def test_recipe_is_copied_here_if_no_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["recipes", "copy", "pretrain.py"])
    assert (tmp_path / "pretrain.py").exists()


def test_recipe_that_reads_another_brings_it_along(tmp_path, capsys):
    """But not in the place of one that is there."""
    main(["recipes", "copy", "zero_memory_table", str(tmp_path)])
    assert {file.name for file in tmp_path.iterdir()} == {
        "pretrain.py",
        "zero_memory_table.py",
    }
    (tmp_path / "pretrain.py").write_text("mine")
    main(["recipes", "copy", "zero_memory_table", str(tmp_path), "--force"])
    assert (tmp_path / "pretrain.py").read_text() == "mine"


def test_file_that_is_there_is_replaced_by_force_alone(tmp_path, capsys):
    (tmp_path / "pretrain.py").write_text("mine")
    said = refused(capsys, "copy", "pretrain", tmp_path)
    assert said == (
        f"jaxpar: '{tmp_path}/pretrain.py' is there already: name another folder, or "
        "give --force to replace it\n"
    )
    assert (tmp_path / "pretrain.py").read_text() == "mine"
    main(["recipes", "copy", "pretrain", str(tmp_path), "--force"])
    assert (tmp_path / "pretrain.py").read_text() == RECIPES["pretrain"].read_text()


def test_recipe_that_there_is_not_is_named_with_the_nearest(tmp_path, capsys):
    assert refused(capsys, "copy", "pretrian", tmp_path / "own") == (
        "jaxpar: there is no recipe 'pretrian'. Did you mean 'pretrain'? The recipes "
        f"are {', '.join(sorted(RECIPES))}.\n"
    )
    assert not (tmp_path / "own").exists()


@pytest.mark.thorough
def test_wheel_has_the_recipes_and_copies_them(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=source,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    # A wheel's files are where an installer puts them; its packages are ours.
    zipfile.ZipFile(wheel).extractall(site)
    assert {path.name for path in site.iterdir() if path.is_dir()} == {
        "jaxpar",
        "jaxpar-0.1.0.dist-info",
        "kernels_pallas",
    }
    program = "import jaxpar, runpy; print(jaxpar.__file__); "
    program += "runpy.run_module('jaxpar', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program, "recipes", "copy", "pretrain", "own"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[0]) == site / "jaxpar" / "__init__.py"
    copied = tmp_path / "own" / "pretrain.py"
    assert copied.read_text() == RECIPES["pretrain"].read_text()
    stubs = {file.relative_to(ROOT) for file in (ROOT / "jaxpar").rglob("*.pyi")}
    stubs |= {file.relative_to(ROOT) for file in (ROOT / "jaxpar").rglob("*.toml")}
    assert {stub for stub in stubs if not (site / stub).exists()} == set()
