"""Does a state go on, bit for bit, on every other mesh, stage, precision and schedule?

Each configuration saves a state; every other takes it up: no bit of masters or of the
optimizer's state may differ. The next loss is the saver's to 1e-6 relative where both
compute in fp32 (only the order of sums differs), and otherwise to the bit that of an
engine whose masters were put in its place by hand.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from tests.model.toys import BATCHES, loss_fn, make_model

LAYERS = 4


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to run."""

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    zero: int = 0
    precision: str = "fp32"
    schedule: str = "1f1b"

    def __str__(self) -> str:
        schedule = f"-{self.schedule}" if self.pipe > 1 else ""
        mesh = f"d{self.data}p{self.pipe}t{self.tensor}"
        return f"{mesh}-z{self.zero}-{self.precision}{schedule}"


SETTINGS = (
    Setting(),
    Setting(data=2, zero=1),
    Setting(data=4, zero=2, precision="bf16"),
    Setting(data=8, zero=3),
    Setting(data=2, tensor=2, zero=3, precision="fp16"),
    Setting(tensor=4, zero=1),
    Setting(data=2, pipe=2, tensor=2, zero=1),
    Setting(pipe=4, data=2, zero=2, schedule="interleaved:1", precision="bf16"),
    Setting(pipe=2, zero=3, schedule="zero_bubble"),
    Setting(pipe=2, data=2, zero=0, schedule="interleaved"),
)
LONG = SETTINGS[4:]


@functools.cache
def engine_of(setting: Setting) -> jaxpar.Engine:
    shape = jaxpar.MeshShape(setting.data, setting.pipe, setting.tensor)
    size = setting.data * setting.pipe * setting.tensor
    return jaxpar.initialize(
        model=make_model(num_blocks=LAYERS),
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-2),
        sample_batch=BATCHES[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()[:size]),
        zero=setting.zero,
        precision=setting.precision,
        accumulate=4 if setting.pipe > 1 else 1,
        schedule=setting.schedule,
        seed=SETTINGS.index(setting),
    )


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a setting saved, and the loss that followed."""

    folder: Path
    step: int
    state: list[np.ndarray]
    loss: float


def host(state: Any) -> list[np.ndarray]:
    plain = dataclasses.replace(state, key=jax.random.key_data(state.key))
    return [np.array(leaf) for leaf in jax.tree.leaves(plain)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("matrix")

    @functools.cache
    def of(setting: Setting) -> Saved:
        engine = engine_of(setting)
        for batch in BATCHES[:2]:
            engine.step(batch)
        engine.save(folder / str(setting))
        engine.wait()
        step, state = int(engine.state.step), host(engine.state)
        loss = float(engine.step(BATCHES[2])["loss"])
        return Saved(folder / str(setting), step, state, loss)

    return of


def by_hand(engine: jaxpar.Engine, state: list[np.ndarray]) -> float:
    """The next loss of an engine whose state is put there, leaf by leaf."""
    template = engine.state
    plain = dataclasses.replace(template, key=jax.random.key_data(template.key))
    leaves, structure = jax.tree.flatten(plain)
    placed = [
        jax.device_put(value, leaf.sharding)
        for value, leaf in zip(state, leaves, strict=True)
    ]
    made = jax.tree.unflatten(structure, placed)
    key = jax.device_put(jax.random.wrap_key_data(made.key), engine.state.key.sharding)
    engine._leaves = jax.tree.leaves(dataclasses.replace(made, key=key))
    return float(engine.step(BATCHES[2])["loss"])


PAIRS = [
    pytest.param(
        source, target, id=f"{source} to {target}",
        marks=[pytest.mark.slow] if {source, target} & set(LONG) else [],
    )
    for source in SETTINGS
    for target in SETTINGS
    if source != target
]  # fmt: skip


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_setting_takes_up_what_every_other_saved(
    source: Setting, target: Setting, saved: Any
) -> None:
    there, engine = saved(source), engine_of(target)
    assert engine.restore(there.folder) == there.step
    for mine, theirs in zip(host(engine.state), there.state, strict=True):
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)
    loss = float(engine.step(BATCHES[2])["loss"])
    if source.precision == target.precision == "fp32":
        assert loss == pytest.approx(there.loss, rel=1e-6)
    else:
        assert loss == by_hand(engine, there.state)
