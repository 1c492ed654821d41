"""Does a model whose middle blocks see some tokens train as its definition does?"""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxpar
from tests.equivalence.dropped_tokens import batches, make_engine, trained_plainly
from tests.equivalence.problems import distance

MESHES: dict[str, dict[str, Any]] = {
    "one device": {},
    "ZeRO 0": {"zero": 0, "data": 4},
    "ZeRO 1": {"zero": 1, "data": 4},
    "ZeRO 2": {"zero": 2, "data": 4},
    "ZeRO 3": {"zero": 3, "data": 8},
    "ZeRO 3, tensor": {"zero": 3, "data": 2, "tensor": 2},
    "tensor": {"zero": 0, "tensor": 4},
    "pipe": {"zero": 1, "data": 2, "pipe": 2},
    "pipe, tensor": {"zero": 2, "pipe": 2, "tensor": 2},
}


def on_mesh(name: str, **given: Any) -> jaxpar.Engine:
    own = {**MESHES[name], **given}
    axes = {axis: own.pop(axis) for axis in ("data", "tensor", "pipe") if axis in own}
    return make_engine(axes, **own)


@functools.cache
def trained(name: str, **given: Any) -> tuple[list[float], Any]:
    engine = on_mesh(name, **given)
    losses = [float(engine.step(batch)["loss"]) for batch in batches()]
    return losses, jax.device_get(engine.state.params)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", MESHES)
def test_trains_as_defined(name: str, accumulate: int) -> None:
    right, params = trained_plainly(accumulate)
    losses, found = trained(name, accumulate=accumulate)
    assert losses == pytest.approx(right, rel=1e-5)
    assert distance(found, params) < 1e-5


@pytest.mark.parametrize("name", ["ZeRO 3, tensor", "pipe"])
def test_with_dropout_trains_as_on_one_device(name: str) -> None:
    how = {"dropout": 0.2, "accumulate": 2}
    right, params = trained("one device", **how)
    losses, found = trained(name, **how)
    assert losses == pytest.approx(right, rel=1e-5)
    assert distance(found, params) < 1e-5


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_recomputed_blocks_see_the_same_tokens(remat: str) -> None:
    losses, found = trained("ZeRO 3, tensor", remat=remat, accumulate=2)
    right, params = trained_plainly(2)
    assert losses == pytest.approx(right, rel=1e-5)
    assert distance(found, params) < 1e-5


def test_resumed_run_is_equal_to_the_bit(tmp_path: Path) -> None:
    name = "ZeRO 3, tensor"
    right, params = trained(name, accumulate=2)
    engine = on_mesh(name, accumulate=2)
    for batch in batches()[:2]:
        engine.step(batch)
    engine.save(tmp_path)
    engine.wait()
    engine = on_mesh(name, accumulate=2)
    engine.restore(tmp_path)
    losses = [float(engine.step(batch)["loss"]) for batch in batches()[2:]]
    assert losses == right[2:]
    found = jax.device_get(engine.state.params)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_evaluation_sees_all_tokens() -> None:
    engine = on_mesh("ZeRO 3, tensor")
    params, batch = jax.device_get(engine.state.params), batches()[0]
    whole = jaxpar.PipelineModel(
        **{
            name: getattr(engine.arguments["model"].model, name)
            for name in ("embed", "sections", "head")
        }
    )
    made = whole.init(0, batch["x"]).with_params(params)
    right = np.mean((np.asarray(made(batch["x"])) - batch["y"]) ** 2)
    assert float(engine.evaluate(batch)["loss"]) == pytest.approx(right, rel=1e-6)


@pytest.mark.usefixtures("checked_losses")
def test_the_check_of_the_loss_passes() -> None:
    on_mesh("ZeRO 3, tensor", accumulate=2).step(batches()[0])


def test_closed_forms_hold() -> None:
    on_mesh("ZeRO 3, tensor").verify()
