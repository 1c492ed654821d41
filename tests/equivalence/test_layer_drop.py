"""Does a model whose layers are dropped by chance train as on one device?"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.model.layer_drop import LayerDrop
from jaxpar.models import decoder_loss, make_decoder
from tests.equivalence.looped_gpt import CONFIG, batches

DROP = LayerDrop(theta=0.3, gamma=0.5)
MESHES: dict[str, dict[str, Any]] = {
    "data, ZeRO 0": {"zero": 0, "data": 4},
    "ZeRO 1": {"zero": 1, "data": 4},
    "ZeRO 2": {"zero": 2, "data": 4},
    "ZeRO 3": {"zero": 3, "data": 4},
    "ZeRO 3, tensor": {"zero": 3, "data": 2, "tensor": 2},
    "tensor": {"zero": 0, "data": 1, "tensor": 2},
    "pipe": {"zero": 1, "data": 2, "pipe": 2},
    "replica": {"zero": 3, "data": 2, "replica": 2},
}


def make_engine(
    zero: int = 0,
    accumulate: int = 1,
    remat: str = "none",
    loss_fn: Callable[..., Any] = decoder_loss,
    **axes: int,
) -> jaxpar.Engine:
    config = dataclasses.replace(CONFIG, dropout=0.1, remat=remat, num_layers=6)
    shape = jaxpar.MeshShape(**{"data": 1, **axes})
    return jaxpar.initialize(
        model=dataclasses.replace(make_decoder(config), layer_drop=DROP),
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.5),
        sample_batch=batches()[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
        zero=zero,
        accumulate=accumulate,
    )


@functools.cache
def trained(**given: Any) -> tuple[list[float], Any]:
    engine = make_engine(**given)
    losses = [float(engine.step(batch)["loss"]) for batch in batches() * 2]
    return losses, jax.device_get(engine.state.params)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", MESHES)
def test_trains_as_on_one_device(name: str, accumulate: int) -> None:
    right, params = trained(accumulate=accumulate)
    losses, found = trained(**MESHES[name], accumulate=accumulate)
    assert losses == pytest.approx(right, rel=1e-5)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_resumed_run_draws_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    right, _ = trained(zero=3, data=4)
    engine = make_engine(zero=3, data=4)
    for batch in batches():
        engine.step(batch)
    engine.save(tmp_path)
    engine.wait()
    engine = make_engine(zero=3, data=4)
    engine.restore(tmp_path)
    losses = [float(engine.step(batch)["loss"]) for batch in batches()]
    assert losses == right[len(losses) :]


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_recomputed_blocks_are_left_out_alike(remat: str) -> None:
    losses, _ = trained(zero=3, data=4, remat=remat)
    assert losses == pytest.approx(trained()[0], rel=1e-5)


def test_closed_forms_hold_with_the_share_in_the_end() -> None:
    make_engine(zero=3, data=4).verify()


def test_shards_that_would_draw_each_for_itself_are_refused() -> None:
    """They would leave different layers out, and wait for each other for ever."""

    def two_rows(model: Any, batch: Any) -> Any:
        assert len(batch["tokens"]) == 2, "of each of four shards"
        return decoder_loss(model, batch)

    with pytest.raises(ValueError, match="layer_drop must be None here"):
        make_engine(zero=3, data=4, loss_fn=two_rows)
