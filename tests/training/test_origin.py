"""Does a new run begin with the parameters of another one, and with nothing else?"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxpar
from jaxpar.checkpoint.exports import export
from jaxpar.training.record import read
from jaxpar.tree import named_leaves
from tests.runs import events
from tests.training.changing import Config, go, stream


def values(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in named_leaves(tree).items()}


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("form", ["run", "checkpoints", "safetensors"])
def test_new_run_begins_with_parameters_of_another(
    form: str, tmp_path: Path, capsys: Any
):
    first, _ = go(tmp_path / "first", Config())
    origin = {
        "run": tmp_path / "first",
        "checkpoints": tmp_path / "first" / "checkpoints",
        "safetensors": tmp_path / "out",
    }[form]
    if form == "safetensors":
        export(tmp_path / "first" / "checkpoints", origin, only=("params/*",))
    config = Config(steps=0, init_from=str(origin))
    ema = {"carried": [jaxpar.Ema(0.9)]}
    second, _ = go(tmp_path / "second", config, **ema)
    assert equal(values(second.state.params), values(first.state.params))
    assert equal(values(second.state.carried["ema"]), values(first.state.params))
    assert second.steps == 0
    assert f"parameters of {origin}" in capsys.readouterr().out
    (event,) = events(tmp_path / "second", "began from")
    assert event["origin_step"] == (None if form == "safetensors" else 3)
    # It is a run of its own: its data is at the start, it resumes without the flag.
    third, data = go(tmp_path / "second", Config(steps=1), **ema)
    np.testing.assert_array_equal(data.given[0], stream(8))
    assert third.steps == 1
    assert read(tmp_path / "second")["init_from"] == str(origin)


def test_run_that_has_begun_elsewhere_is_refused(tmp_path: Path):
    go(tmp_path / "first", Config(steps=1))
    origin = str(tmp_path / "first")
    with pytest.raises(ValueError, match="has begun with parameters of its own"):
        jaxpar.open_run(origin, Config(init_from=origin), {"corpus": 0})
    go(tmp_path / "second", Config(steps=1, init_from=origin))
    jaxpar.open_run(
        tmp_path / "second", Config(steps=1, init_from=origin), {"corpus": 0}
    )
    with pytest.raises(ValueError, match=r"has begun from '.*first'"):
        jaxpar.open_run(tmp_path / "second", Config(init_from="x"), {"corpus": 0})


def test_origin_without_parameters_is_refused_before_anything_is_made(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        config = Config(init_from=str(tmp_path / name))
        with pytest.raises(FileNotFoundError, match=r"has no parameters: give"):
            jaxpar.open_run(tmp_path / "run", config, {})
    assert not (tmp_path / "run").exists()
