"""What does an update on disk leave out of programs, refuse, and survive?

tests/equivalence/test_offload_to_disk.py has what it trains like.
"""

import errno
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxpar
from jaxpar.offload import disk_pipeline, disk_store, disk_update
from tests.equivalence.perceptron import batches, make_engine

ADAM = optax.adamw(1e-2)


def engine_of(folder: Path, optimizer=ADAM, **options) -> jaxpar.Engine:
    offload = jaxpar.Offload(optimizer="disk", path=str(folder), piece_mb=0.0002)
    return make_engine(optimizer, 4, 2, 3, **{"offload": offload, **options})


def numbers(engine: jaxpar.Engine) -> list[np.ndarray]:
    state = engine.state
    return [np.array(x) for x in jax.tree.leaves((state.params, state.opt_state))]


def assert_equal(one: list, other: list) -> None:
    for x, y in zip(one, other, strict=True):
        np.testing.assert_array_equal(x, y)


def test_programs_have_no_masters_and_no_moments(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, precision="bf16")
    packed = {str(x.dtype) for x in jax.tree.leaves(engine.placement.packed.params)}
    assert packed == {"bfloat16"}
    assert {x.shape for x in jax.tree.leaves(engine.placement.packed.opt_state)} == {()}
    assert any("are on disk" in line for line in engine.notes)
    assert "on disk" in str(engine.explain())
    engine.verify()


def test_the_state_may_be_on_other_devices_than_the_run_s(tmp_path: Path) -> None:
    """As on GPUs, where it is on the CPUs beside them: no program mixes the two."""
    cpus = jax.devices()[4:]

    def twin(mesh: Mesh) -> Mesh:
        beside = np.vectorize(lambda device: cpus[device.id], otypes=[object])
        return Mesh(beside(mesh.devices), mesh.axis_names, axis_types=mesh.axis_types)

    found = []
    for patched in (twin, lambda mesh: mesh):
        with mock.patch.object(disk_update, "cpu_twin", patched):
            offload = jaxpar.Offload(
                optimizer="disk",
                path=str(tmp_path / str(len(found))),
                piece_mb=0.0002,
            )
            engine = make_engine(ADAM, 2, 2, 3, offload=offload, precision="bf16")
            losses = [float(engine.step(batch)["loss"]) for batch in batches()]
        engine.load_params(jax.tree.map(lambda x: 2 * x, engine.state.params))
        losses.append(float(engine.evaluate(batches()[0])["loss"]))
        given = engine.evaluate(batches()[0], params=engine.state.params)
        losses.append(float(given["loss"]))
        engine.probe()
        folder = tmp_path / f"checkpoints-{len(found)}"
        engine.save(folder)
        engine.wait()
        assert engine.restore(folder) == len(batches())
        losses.append(float(engine.step(batches()[0])["loss"]))
        engine.model()
        found.append((losses, numbers(engine)))
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("call", ["read", "write", "sync"])
def test_after_an_error_of_the_disk_the_run_goes_on(call: str, tmp_path: Path) -> None:
    right = engine_of(tmp_path / "right")
    engine = engine_of(tmp_path / "own")
    for each in (right, engine):
        each.step(batches()[0])
    before = numbers(engine)
    error = OSError(errno.EIO, "Input/output error", "some file")
    with (
        mock.patch.object(disk_pipeline, call, side_effect=error),
        pytest.raises(OSError, match="some file"),
    ):
        engine.step(batches()[1])
    assert_equal(numbers(engine), before)
    for each in (right, engine):
        each.step(batches()[1])
    assert_equal(numbers(engine), numbers(right))


@pytest.mark.parametrize("call", ["_write", "_replace"])
def test_a_step_that_is_taken_and_not_on_disk_is_said(call, tmp_path) -> None:
    """The next one writes it, and raises the error if it can't."""
    right, engine = engine_of(tmp_path / "right"), engine_of(tmp_path / "own")
    for each in (right, engine):
        each.step(batches()[0])
    error = OSError(errno.ENOSPC, "No space left on device", "some file")
    with mock.patch.object(disk_store, call, side_effect=error):
        with pytest.warns(UserWarning, match=r"some file.*taken, but not on disk"):
            engine.step(batches()[1])
        assert engine.steps == 2
        with pytest.raises(OSError, match="some file"):
            engine.step(batches()[2])
    right.step(batches()[1])
    for batch in batches()[2:4]:
        for each in (right, engine):
            each.step(batch)
    assert_equal(numbers(engine), numbers(right))
    found = numbers(engine)
    del engine, each, error  # Its traceback has the engine.
    engine = engine_of(tmp_path / "own")
    assert engine.resume() == 4
    assert_equal(numbers(engine), found)


def test_the_folder_is_that_of_the_start(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = engine_of(Path("state"))
    engine.step(batches()[0])
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    engine.step(batches()[1])
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize(
    ("optimizer", "mesh"), [(ADAM, (2, 4)), (optax.rmsprop(1e-2, momentum=0.9), (4, 2))]
)
def test_resuming_another_run_is_refused(optimizer, mesh, tmp_path) -> None:
    """Also where all of its leaves are on the device, or it has as many moments."""
    fraction = 0.0 if mesh != (4, 2) else 1.0
    offload = jaxpar.Offload(
        optimizer="disk", path=str(tmp_path), piece_mb=0.0002, fraction=fraction
    )
    engine = make_engine(ADAM, 4, 2, 3, offload=offload)
    engine.step(batches()[0])
    del engine
    other = make_engine(optimizer, *mesh, 3, offload=offload)
    with pytest.raises(ValueError, match="step 1 of another model, optimizer, mesh"):
        other.resume()


def test_what_a_user_reads_does_not_change_later(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    engine.step(batches()[0])
    kernel = engine.state.params["out"]["kernel"]
    view, copy = np.asarray(kernel), np.array(kernel)
    for batch in batches()[1:]:
        engine.step(batch)
    np.testing.assert_array_equal(view, copy)
    assert not np.array_equal(engine.state.params["out"]["kernel"], copy)


def test_parameters_are_replaced(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    engine.step(batches()[0])
    moments = numbers(engine)
    engine.load_params(jax.tree.map(lambda x: x + 1, engine.state.params))
    plain = make_engine(ADAM, 4, 2, 3)
    plain.step(batches()[0])
    plain.load_params(jax.tree.map(lambda x: x + 1, plain.state.params))
    losses = [float(each.step(batches()[1])["loss"]) for each in (engine, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(moments) == len(numbers(engine))


@pytest.mark.parametrize(
    ("optimizer", "options", "said"),
    [
        (optax.lamb(1e-2), {}, r"optimizer='disk' updates pieces.*needs all of"),
        (optax.adafactor(1e-2, min_dim_size_to_factor=8), {}, "needs all of"),
        (
            ADAM,
            {"carried": [jaxpar.Ema(0.9)]},
            r"carried: the part 'ema' reads the parameters.*on disk",
        ),
    ],
    ids=["lamb", "adafactor", "ema"],
)
def test_what_needs_the_masters_is_refused(optimizer, options, said, tmp_path) -> None:
    with pytest.raises(ValueError, match=said):
        engine_of(tmp_path, optimizer, **options)


def test_a_state_of_one_s_own_is_refused(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    with pytest.raises(ValueError, match=r"train_step: .* call engine.step"):
        engine.train_step(engine.state, batches()[0])


def test_two_engines_dont_share_a_folder(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    with pytest.raises(ValueError, match="another engine uses"):
        engine_of(tmp_path)
    engine.step(batches()[0])


def test_initialising_holds_one_leaf_at_a_time(tmp_path: Path) -> None:
    """Each leaf is stored before the next one is made."""
    order = []
    real = disk_update.DiskUpdate.puts

    def puts(self, params, opt_state):
        return jax.tree.map(
            lambda put: lambda x: (order.append(x.shape), put(x))[1],
            real(self, params, opt_state),
        )

    alive = []
    with mock.patch.object(disk_update.DiskUpdate, "puts", puts):
        engine = engine_of(tmp_path)
    large = [x for x in jax.live_arrays() if x.shape == (16, 64)]
    alive = [x for x in large if x.sharding.num_devices == 8]
    assert order.count((16, 64)) == 3
    assert engine.steps == 0
    assert len(alive) <= 1  # The copy; maps are made when they are asked for.
