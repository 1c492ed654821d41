"""Do parameters leave as the masters are, and come back to the same loss?"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpar.checkpoint import Checkpoints, DamagedError
from jaxpar.checkpoint.exports import export, import_safetensors
from tests.memory import most_bytes
from tests.runs import Data, fresh

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, float]:
    """A run's checkpoints, its parameters by their names outside, its next loss."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    engine, data = fresh(), Data()
    for _ in range(3):
        engine.step(next(data))
    engine.save(folder)
    engine.wait()
    named = {
        f"{module}.{name}": np.asarray(leaf)
        for module, leaves in engine.state.params.items()
        for name, leaf in leaves.items()
    }
    return folder, named, float(engine.evaluate(next(Data()))["loss"])


def loaded(paths: list[Path]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in paths:
        found |= load_file(path)
    return found


@pytest.mark.parametrize("file_bytes", [10**9, 3000, 1])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_equals_the_masters_to_the_dtype(
    dtype: str, file_bytes: int, saved: Any, tmp_path: Path
) -> None:
    folder, masters, _ = saved
    paths = export(folder, tmp_path / "out", dtype=dtype, file_bytes=file_bytes)
    found = loaded(paths)
    assert found.keys() == masters.keys()
    rounds = ml_dtypes.bfloat16 if dtype == "bf16" else np.float32
    for name, master in masters.items():
        assert found[name].dtype == rounds
        assert np.array_equal(found[name], master.astype(rounds))
    # Two leaves of 640 elements and one of 40.
    count = {10**9: 1, 3000: 2 if dtype == "fp32" else 1, 1: 3}[file_bytes]
    assert len(paths) == count
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == (len(paths) > 1)
    if index.exists():
        content = json.loads(index.read_text())
        assert content["weight_map"].keys() == masters.keys()
        assert set(content["weight_map"].values()) == {path.name for path in paths}


def test_round_trip_gives_the_same_loss(saved: Any, tmp_path: Path) -> None:
    folder, _, loss = saved
    paths = export(folder, tmp_path / "out", file_bytes=2600)
    assert len(paths) > 1
    names = import_safetensors([tmp_path / "out"], tmp_path / "back")
    engine = fresh()
    assert float(engine.evaluate(next(Data()))["loss"]) != loss
    assert engine.restore(tmp_path / "back", only=["params/*"]) == 0
    assert float(engine.evaluate(next(Data()))["loss"]) == loss
    assert len(names) == len(jax.tree.leaves(engine.state.params))


def test_damaged_step_is_not_exported(saved: Any, tmp_path: Path) -> None:
    folder = saved[0]
    file = next((folder / "step_00000003" / "arrays").rglob("d/*"))
    before = file.read_bytes()
    try:
        file.write_bytes(b"x" + before[1:])
        with pytest.raises(DamagedError, match=file.name):
            export(folder, tmp_path / "out")
    finally:
        file.write_bytes(before)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "fp8"}, "dtype='fp8' must be one of fp32, bf16"),
        ({"only": ["nothing/*"]}, "matches no leaf"),
        ({"file_bytes": 0}, "file_bytes=0 must be at least 1"),
    ],
)
def test_wrong_exports_are_refused(
    options: dict, text: str, saved: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=text):
        export(saved[0], tmp_path / "out", **options)
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="exists already; name a new folder"):
        export(saved[0], tmp_path / "there")


def test_wrong_imports_are_refused(tmp_path: Path) -> None:
    array = np.ones(2, np.float32)
    with pytest.raises(ValueError, match="is not a file or a folder"):
        import_safetensors([tmp_path / "none"], tmp_path / "x")
    with pytest.raises(ValueError, match="has no safetensors files"):
        import_safetensors([tmp_path], tmp_path / "x")
    (tmp_path / "a.safetensors").write_bytes(b"\x08" + bytes(7) + b"not json")
    with pytest.raises(DamagedError, match=r"a\.safetensors' is not safetensors"):
        import_safetensors([tmp_path], tmp_path / "x")
    save_file({"a": array, "a.b": array}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"is nested below|can't be a leaf's name"):
        import_safetensors([tmp_path], tmp_path / "x")
    save_file({"a": array}, tmp_path / "a.safetensors")
    save_file({"a": array}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="'a' is in another file too"):
        import_safetensors([tmp_path], tmp_path / "x")
    assert not (tmp_path / "x").exists()


def export_and_tell(folder: str, out: str) -> None:
    """Export, and print the most memory that it took, in bytes above the start."""
    before = most_bytes()
    export(Path(folder), Path(out), file_bytes=70_000_000)
    print(most_bytes() - before)


@pytest.mark.slow
def test_model_larger_than_the_memory_it_takes_is_exported(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "a")
    leaf = jnp.arange(16_000_000, dtype=jnp.float32)
    checkpoints.save(1, {"params": {f"w{i}": leaf + i for i in range(10)}})
    checkpoints.close()
    paths = f"({str(tmp_path / 'a')!r}, {str(tmp_path / 'o')!r})"
    code = f"from tests.checkpoint.test_exports import *; export_and_tell{paths}"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    # 640 MB of parameters; a file and a leaf, and what readers hold beside.
    assert int(ran.stdout.split()[-1]) < 350_000_000
    assert len(list((tmp_path / "o").glob("*.safetensors"))) == 10
