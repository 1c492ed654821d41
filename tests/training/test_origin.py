"""Does a new run begin with the parameters of another one, and with nothing else?"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import jaxpar
from jaxpar.checkpoint.exports import export
from jaxpar.training.origin import find_parameters, load_parameters
from jaxpar.training.record import read
from jaxpar.tree import named_leaves
from tests.runs import events
from tests.training.changing import VOCAB, Config, Net, go, make_engine, stream


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
    at = "" if form == "safetensors" else ", step 3"
    said = f"starts with the parameters of {origin}{at}\n"
    assert said in capsys.readouterr().out
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


def test_safetensors_are_refused_by_several_processes(tmp_path: Path, monkeypatch: Any):
    """They are read by one; a checkpoint of them is read by all."""
    origin = tmp_path / "model.safetensors"
    origin.write_bytes(b"")
    assert find_parameters(origin) == origin
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for given in (origin, tmp_path):
        said = rf"init_from='{given}' .* `jaxpar ckpt import FOLDER {given}`"
        with pytest.raises(ValueError, match=said):
            find_parameters(given)


class Adapted(Net):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.lora_a = nnx.LoRAParam(jax.random.normal(rngs.params(), (VOCAB, 2)))
        self.lora_b = nnx.LoRAParam(jax.numpy.zeros((2, VOCAB)))

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        out = super().__call__(tokens_BT)
        return out + out @ self.lora_a[...] @ self.lora_b[...]


def test_adapters_over_a_model_that_has_none_begin_as_they_are(tmp_path: Path):
    first, _ = go(tmp_path / "first", Config())
    engine = make_engine(
        Config(), model=lambda rngs: Adapted(rngs), trainable=nnx.LoRAParam
    )
    before = values(engine.state.params)
    assert sorted(before) == ["lora_a", "lora_b"]
    assert load_parameters(engine, tmp_path / "first") == 3
    assert equal(values(engine.state.frozen), values(first.state.params))
    assert equal(values(engine.state.params), before)
