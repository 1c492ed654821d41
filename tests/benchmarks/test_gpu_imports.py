"""Does a process of the dry run find what such a machine has, and nothing else?"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.day import REFUSING, ROOT
from benchmarks.gpu.imports import CARRIED, IMAGE, required_by, wheels


def refusing(code: str) -> "subprocess.CompletedProcess[str]":
    """Run code as a case of the dry run is."""
    path = os.pathsep.join((str(REFUSING), str(ROOT)))
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


MAY_BE_MISSING = ("tyro", "grain", "beartype", "hypothesis", "tokenizers", "PIL")


def test_package_that_may_be_missing_is_not_found() -> None:
    assert all(map(importlib.util.find_spec, MAY_BE_MISSING)), "they are here"
    asked = f"any(map(importlib.util.find_spec, {MAY_BE_MISSING}))"
    done = refusing(f"import importlib.util; assert not {asked}")
    assert done.returncode == 0, done.stderr
    done = refusing("import tyro")
    assert "ModuleNotFoundError: No module named 'tyro'" in done.stderr


def test_what_is_there_is_found_with_what_it_requires() -> None:
    # yaml and rich come with flax, numpy with jax.
    names = "numpy, yaml, rich, jaxtyping, lazy_loader, xxhash, jaxpar, kernels_pallas"
    done = refusing(
        f"import {names}, importlib.metadata as m; print(m.version('jaxtyping'))\n"
        "try: m.version('beartype')\n"
        "except m.PackageNotFoundError: print('absent')\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "absent"


def test_process_that_starts_a_contestant_leaves_the_gpu_to_it() -> None:
    done = refusing(
        "import benchmarks.gpu.training, benchmarks.kernels.torch_side\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()"
    )
    assert done.returncode == 0, done.stderr


def test_only_what_the_image_does_not_bring_is_carried() -> None:
    brought = required_by(IMAGE)
    assert not {name.replace("_", "-") for name in CARRIED} & brought


def test_wheels_have_the_versions_of_the_main_lane(tmp_path: Path) -> None:
    (tmp_path / "common.txt").write_text("xxhash==4.0\nLazy-Loader==0.6\n")
    main = tmp_path / "main.txt"
    main.write_text("-c common.txt\njaxtyping==0.3.1\nwadler_lindig==0.1.7\n")
    assert wheels(main) == [
        "jaxtyping==0.3.1",
        "wadler_lindig==0.1.7",
        "Lazy-Loader==0.6",
        "xxhash==4.0",
    ]
    assert len(wheels()) == len(CARRIED)


def test_package_without_a_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "main.txt").write_text("jaxtyping==0.3.1\nxxhash==4.0\n")
    with pytest.raises(ValueError, match="wadler_lindig, lazy_loader must have a vers"):
        wheels(tmp_path / "main.txt")
