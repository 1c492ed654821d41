"""Is a process prepared for compilers, and a missing one told with what to install?"""

import importlib.machinery
import importlib.util
import os
import sys

import jax
import pytest

from jaxpar.planner import absent_devices
from jaxpar.planner.absent_devices import (
    gpu_devices,
    has_gpu_compiler,
    has_tpu_compiler,
    prepare_process,
    tpu_devices,
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The modules that can be found, and their files; none at first."""
    found: dict[str, str | None] = {}

    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        if name not in found:
            if "." in name:  # As Python does where the package is missing.
                raise ModuleNotFoundError(name)
            return None
        return importlib.machinery.ModuleSpec(name, None, origin=found[name])

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return found


def test_missing_compilers_are_told_with_what_to_install(installed) -> None:
    assert not has_gpu_compiler()
    assert not has_tpu_compiler()
    with pytest.raises(ModuleNotFoundError, match="--no-deps jax-cuda13-plugin jax-cu"):
        gpu_devices("h200", 1, 8)
    with pytest.raises(ModuleNotFoundError, match=r"TPUs need .*; pip install libtpu"):
        tpu_devices("v5e:2x2")


def test_installed_compilers_are_found_each_by_itself(installed) -> None:
    installed["jax_plugins.xla_cuda13"] = "somewhere/__init__.py"
    assert (has_gpu_compiler(), has_tpu_compiler()) == (True, False)
    installed["libtpu"] = "somewhere/__init__.py"
    assert has_tpu_compiler()
    installed["libtpu"] = None
    assert not has_tpu_compiler(), "a folder of that name is not libtpu"


@pytest.mark.parametrize("is_there", [True, False])
def test_process_sees_no_accelerator_and_the_folder_of_compilers(
    is_there, tmp_path, monkeypatch
) -> None:
    """Others that plan at the same time may load libtpu too."""
    names = ("CUDA_VISIBLE_DEVICES", "TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD")
    for name in names:
        monkeypatch.setenv(name, "before")
    monkeypatch.setattr(sys, "path", ["first"])
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    set_to: dict[str, str] = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    folder = tmp_path / "compilers"
    if is_there:
        folder.mkdir()
    prepare_process()
    prepare_process()
    assert [os.environ[name] for name in names] == ["-1", "1", "1"]
    assert sys.path == ["first", *([str(folder)] if is_there else [])]
    assert set_to == {"jax_platforms": "cpu"}


def test_cuda_is_a_platform_to_lower_for_and_others_are_as_before(monkeypatch) -> None:
    """TODO(jax issue 23971): drop with `_accept_cuda`."""

    def canonicalize(platform: str) -> str:
        if platform == "cuda":
            raise RuntimeError("no such backend")
        return f"canonical {platform}"

    bridge = absent_devices.xla_bridge
    monkeypatch.setattr(bridge, "canonicalize_platform", canonicalize)
    absent_devices._accept_cuda.__wrapped__()
    assert bridge.canonicalize_platform("cuda") == "cuda"
    assert bridge.canonicalize_platform("cpu") == "canonical cpu"
