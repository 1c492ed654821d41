"""Does a model train as ever whose layers are fetched from host memory, or from disk?

To the bit as the same update with parameters on the devices, which other tests compare
with the plain step.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.models import LayerDrop, decoder_loss, make_decoder
from jaxpar.models.experts import ExpertsConfig
from tests.equivalence.foreign_models import Scanned
from tests.equivalence.looped_gpt import CONFIG, batches
from tests.equivalence.perceptron import make_engine, make_piped_engine

EXPERTS = ExpertsConfig(num=4, top_k=2)
ADAM = optax.adam(1e-3)
HOST = jaxpar.Offload(piece_mb=0.0002, update="host")
pytestmark = pytest.mark.filterwarnings(
    "ignore::jaxpar.engine.run_ahead.SkippedStepWarning"
)


def disk(folder: Path, params: str | None) -> jaxpar.Offload:
    given = {"optimizer": "disk", "piece_mb": 0.0002, "path": str(folder)}
    return jaxpar.Offload(params=params, **given)


def make(
    offload: jaxpar.Offload | None, *, drop: LayerDrop | None = None, **given: Any
) -> jaxpar.Engine:
    axes = {axis: given.pop(axis, 1) for axis in ("replica", "tensor", "expert")}
    shape = jaxpar.MeshShape(data=given.pop("data", 2), **axes)
    config = dataclasses.replace(CONFIG, **given.pop("config", {}))
    return jaxpar.initialize(
        model=dataclasses.replace(make_decoder(config), layer_drop=drop),
        loss_fn=decoder_loss,
        sample_batch=batches()[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
        offload=offload,
        **{"optimizer": optax.adamw(1e-2), "check_loss": False, **given},
    )


def trained(engine: jaxpar.Engine) -> tuple[list[float], list[float], Any]:
    found = [engine.step(batch) for batch in batches()]
    losses = [float(metrics["loss"]) for metrics in found]
    losses.append(float(engine.evaluate(batches()[0])["loss"]))
    state = jax.device_get((engine.state.params, engine.state.opt_state))
    return losses, [float(metrics["grad_norm"]) for metrics in found], state


def assert_alike(engine: jaxpar.Engine, right: jaxpar.Engine) -> None:
    # In half precision, programs round some of the initial values in another way.
    right.load_params(jax.device_get(engine.state.params))
    found, wanted = trained(engine), trained(right)
    assert found[0] == wanted[0]
    # Squares are added in another order.
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, found[2], wanted[2])


@pytest.mark.parametrize(
    ("where", "given"),
    [
        ("disk", {"zero": 3, "tensor": 2, "precision": "bf16"}),
        ("host", {"zero": 3, "tensor": 2, "accumulate": 2}),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                ("disk", {"zero": 0, "data": 2}),
                ("disk", {"zero": 1, "data": 4, "precision": "fp16"}),
                ("disk", {"zero": 2, "replica": 2}),
                ("disk", {"zero": 3, "data": 1, "precision": "bf16"}),
                ("disk", {"zero": 3, "config": {"remat": "full"}}),
                ("host", {"zero": 0, "precision": "bf16"}),
                ("host", {"zero": 1, "data": 4, "tensor": 2}),
                ("host", {"zero": 3, "data": 1}),
                ("host", {"zero": 3, "drop": LayerDrop(theta=0.2, gamma=9.0)}),
                ("host on disk", {"zero": 3, "precision": "bf16", "tensor": 2}),
            ]
        ),
    ],
)
def test_trains_as_with_parameters_on_the_devices(where, given, tmp_path) -> None:
    offload = dataclasses.replace(HOST, params="host")
    if "disk" in where:
        offload = disk(tmp_path, where.split()[0])
    engine = make(offload, **given)
    assert engine.placement.update.fetched
    assert_alike(engine, make(HOST, **given))


@pytest.mark.thorough
def test_experts_that_an_axis_divides(tmp_path: Path) -> None:
    """To rounding: XLA fuses what routes in another way."""
    given: Any = {"zero": 3, "expert": 2, "config": {"experts": EXPERTS}}
    engine, right = make(disk(tmp_path, "disk"), **given), make(HOST, **given)
    (losses, norms, _), (wanted, right_norms, _) = map(trained, (engine, right))
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    np.testing.assert_allclose(norms, right_norms, rtol=1e-6)


def test_gradients_are_clipped_by_their_norm(tmp_path: Path) -> None:
    engines = make(disk(tmp_path, "disk"), clip_norm=0.1), make(HOST, clip_norm=0.1)
    (losses, norms, _), (right, right_norms, _) = map(trained, engines)
    assert min(norms) > 0.1
    np.testing.assert_allclose(norms, right_norms, rtol=1e-6)
    np.testing.assert_allclose(losses, right, rtol=1e-6)


def loss_of_scanned(model: Scanned, batch: dict) -> jax.Array:
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@pytest.mark.thorough
@pytest.mark.usefixtures("checked_losses")
@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_model_that_nobody_here_wrote(where: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(32, 16)).astype(np.float32),
        "y": rng.integers(0, 4, 32, np.int32),
    }
    losses = []
    for offload in (disk(tmp_path, where), None):
        engine = jaxpar.initialize(
            model=lambda rngs: Scanned(rngs),
            loss_fn=loss_of_scanned,
            optimizer=optax.adamw(1e-2),
            sample_batch=batch,
            mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=4), jax.devices()[:4]),
            zero=3,
            offload=offload,
        )
        losses.append([float(engine.step(batch)["loss"]) for _ in range(6)])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_parameters_that_are_loaded_are_those_that_loops_read(tmp_path: Path) -> None:
    """Though their files were another state's before, of which layers were read."""
    engine, right = make(disk(tmp_path, "disk"), zero=3), make(HOST, zero=3)
    given = jax.tree.map(lambda x: 2 * np.asarray(x), engine.state.params)
    for own in (engine, right):
        own.step(batches()[0])
        own.load_params(given)
    for batch in batches():
        assert float(engine.step(batch)["loss"]) == float(right.step(batch)["loss"])


def test_resumes_from_disk_to_the_bit(tmp_path: Path) -> None:
    given: Any = {"zero": 3, "precision": "bf16"}
    engine, right = make(disk(tmp_path, "disk"), **given), make(HOST, **given)
    right.load_params(jax.device_get(engine.state.params))
    *before, last = batches()
    for batch in before:
        engine.step(batch)
        right.step(batch)
    del engine
    engine = make(disk(tmp_path, "disk"), **given)
    assert engine.resume() == len(before)
    assert float(engine.step(last)["loss"]) == float(right.step(last)["loss"])


@pytest.mark.thorough
def test_checkpoints_move_between_devices_host_and_disk(tmp_path: Path) -> None:
    settings = [
        None,
        dataclasses.replace(HOST, params="host"),
        disk(tmp_path / "a", "disk"),
        None,
    ]
    state = None
    for number, offload in enumerate(settings):
        engine = make(offload, zero=3)
        if number:
            assert engine.restore(tmp_path / "checkpoints") == number
            found = jax.device_get((engine.state.params, engine.state.opt_state))
            jax.tree.map(np.testing.assert_array_equal, found, state)
        engine.step(batches()[0])
        engine.save(tmp_path / "checkpoints")
        engine.wait()
        state = jax.device_get((engine.state.params, engine.state.opt_state))


def test_a_disk_that_fails_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    engine = make(disk(tmp_path, "disk"), zero=3)
    right = make(HOST, zero=3)
    first, second, third = batches()
    for own in (engine, right):
        own.step(first)
    store = next(iter(engine.placement.update.layer_stores().values()))
    file = store.grads[0]
    moved = file.rename(file.with_suffix(".moved"))
    with pytest.raises(OSError, match=file.name):
        engine.step(second)
    moved.rename(file)
    version = store.store().current_version
    away = version.rename(version.with_name("away"))
    with pytest.raises(OSError, match=version.name):
        engine.evaluate(second)
    away.rename(version)
    for own in (engine, right):
        own.step(second)
    assert float(engine.step(third)["loss"]) == float(right.step(third)["loss"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"drop": LayerDrop()}, r"layer_drop must be None with Offload\(params='disk'"),
        ({"accumulate": 2}, "accumulate=2 must be 1 with Offload.params='disk'"),
        (
            {"optimizer": optax.chain(optax.clip_by_global_norm(1.0), ADAM)},
            "the optimizer needs all gradients of .* at once",
        ),
    ],
)
def test_what_can_not_be_on_disk_is_refused(given, said, tmp_path) -> None:
    with pytest.raises(ValueError, match=said):
        make(disk(tmp_path, "disk"), zero=3, **given)


def test_a_model_without_loops_is_refused() -> None:
    offload = dataclasses.replace(HOST, params="host")
    with pytest.raises(ValueError, match="the loss has no scan over stacks"):
        make_engine(optax.adam(1e-3), 2, 1, 3, offload=offload)
    with pytest.raises(ValueError, match="but pipe=2 divides them already"):
        make_piped_engine(optax.adam(1e-3), offload=offload)


def test_stacks_smaller_than_a_piece_are_named_as_the_reason(tmp_path) -> None:
    with pytest.raises(ValueError, match="larger than piece_mb=8 MB"):
        make(dataclasses.replace(disk(tmp_path, "disk"), piece_mb=8.0), zero=3)
