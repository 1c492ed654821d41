"""Do asynchronous schedules train as a simulation of their delays on one device?"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.models import DecoderConfig, make_decoder
from jaxpar.pipeline.schedules.asynchronous import (
    Asynchronous,
    PipeDream2BW,
    PipeMare,
)
from tests.equivalence import problems
from tests.equivalence.delays import (
    CLIP,
    Delays,
    Trained,
    loss_fn,
    make_batches,
    make_model,
)

STEPS, ROWS = 30, 16
ADAMW = optax.adamw(1e-3, eps=1e-6, weight_decay=1e-2)
SGD = optax.sgd(0.1, momentum=0.9)
BW, MARE = PipeDream2BW(), PipeMare(annealing_steps=20)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is combined."""

    kind: Asynchronous
    pipe: int
    accumulate: int
    data: int = 2
    tensor: int = 1
    zero: int = 1
    blocks: int = 4
    tied: bool = True
    remat: str = "full"
    optimizer: Any = ADAMW
    tolerance: float = 1e-5
    rows: int = ROWS

    def engine(self, schedule: Any = None, **axes: int) -> jaxpar.Engine:
        own = {"data": self.data, "pipe": self.pipe, "tensor": self.tensor}
        shape = jaxpar.MeshShape(**(axes or own))
        return jaxpar.initialize(
            model=make_model(self.blocks, tied=self.tied, remat=self.remat),
            loss_fn=loss_fn,
            optimizer=self.optimizer,
            sample_batch=make_batches(self.rows, 1)[0],
            mesh=jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
            accumulate=self.accumulate,
            schedule=schedule or self.kind,
            clip_norm=CLIP,
            zero=self.zero,
        )

    @property
    def delays(self) -> Delays:
        return Delays(
            *(self.kind, self.pipe, self.accumulate), self.blocks, self.optimizer
        )


CASES = {
    "2BW": Case(BW, 2, 4, zero=0, remat="none"),
    "2BW, 4 stages": Case(BW, 4, 8, tied=False, blocks=5),
    "2BW, as few micro-batches as can be": Case(BW, 4, 6, rows=24),
    "2BW, tensor": Case(BW, 2, 2, tensor=2, remat="none"),
    "2BW, SGD": Case(BW, 2, 4, optimizer=SGD, tolerance=1e-6, data=1),
    "PipeMare": Case(MARE, 4, 8),
    "PipeMare, several updates late": Case(MARE, 4, 2, remat="none", zero=0),
    "PipeMare, a micro-batch a step": Case(MARE, 4, 1, tied=False, blocks=6),
    "PipeMare, tensor": Case(MARE, 2, 1, tensor=2),
    "PipeMare, SGD": Case(MARE, 2, 1, optimizer=SGD, tolerance=1e-6, data=1),
}
QUICK = ("2BW", "PipeMare, several updates late")


@functools.cache
def initial(tied: bool, blocks: int) -> Any:
    case = Case(BW, 2, 2, tied=tied, blocks=blocks)
    return jax.device_get(case.engine("1f1b", data=1).state.params)


def trained(case: Case, folder: Path) -> Trained:
    engine = case.engine()
    batches = make_batches(case.rows, STEPS)
    losses = [float(engine.step(batch)["loss"]) for batch in batches]
    engine.save(folder)  # Drains.
    engine.wait()
    assert int(engine.state.carried["loss_scale"].skipped) == 0
    assert engine.steps == STEPS
    return Trained(losses[case.delays.delay :], jax.device_get(engine.state.params))


@functools.cache
def simulated(case: Case) -> Trained:
    params = initial(case.tied, case.blocks)
    return case.delays.run(params, make_batches(case.rows, STEPS))


@pytest.mark.parametrize(
    "name",
    [x if x in QUICK else pytest.param(x, marks=pytest.mark.thorough) for x in CASES],
)
def test_trains_as_a_simulation_of_its_delays(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    right, found = simulated(case), trained(case, tmp_path)
    assert found.losses == pytest.approx(right.losses[: len(found.losses)], rel=1e-5)
    assert problems.distance(found.params, right.params) <= case.tolerance


def test_simulation_tells_a_run_without_the_correction() -> None:
    """What the test of PipeMare would see if the correction were off."""
    case = CASES["PipeMare, several updates late"]
    off = dataclasses.replace(case, kind=dataclasses.replace(MARE, decay=None))
    one, other = simulated(case), simulated(off)
    assert problems.distance(one.params, other.params) > 100 * case.tolerance


@pytest.mark.parametrize("kind", [BW, MARE])
def test_interrupted_run_ends_as_one_that_was_not(
    kind: Asynchronous, tmp_path: Path
) -> None:
    case = Case(kind, 2, 2, blocks=2)
    batches = make_batches(ROWS, 7)

    def run(engine: jaxpar.Engine, own: list, folder: str) -> list[float]:
        losses = [float(engine.step(batch)["loss"]) for batch in own]
        engine.save(tmp_path / folder)
        engine.wait()
        return losses

    whole = case.engine()
    right = [*run(whole, batches[:4], "a"), *run(whole, batches[4:], "a")]
    first = run(case.engine(), batches[:4], "b")
    again = case.engine()
    assert again.restore(tmp_path / "b") == 4
    assert [*first, *run(again, batches[4:], "b")] == right
    for one, other in zip(*map(jax.tree.leaves, _logical(whole, again)), strict=True):
        np.testing.assert_array_equal(one, other)
    elsewhere = case.engine("1f1b", data=4)
    assert elsewhere.restore(tmp_path / "b") == 7
    for one, other in zip(
        *map(jax.tree.leaves, _logical(whole, elsewhere)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def _logical(*engines: jaxpar.Engine) -> list[Any]:
    states = [engine.state for engine in engines]
    return [jax.device_get((x.step, x.params, x.opt_state)) for x in states]


def test_masks_and_steps_are_those_of_each_batch() -> None:
    """With parameters that never change, every loss is that of one device."""
    config = DecoderConfig(
        vocab_size=32, seq_len=4, num_layers=2, num_heads=2, width=16, dropout=0.3
    )

    def by_step(model: Any, batch: dict, step: Any) -> jax.Array:
        out = loss_fn(model, batch)
        return jaxpar.Weighted(out.total * (1.0 + step), out.weight)

    def run(schedule: str, **axes: int) -> list[float]:
        shape = jaxpar.MeshShape(**axes)
        engine = jaxpar.initialize(
            model=make_decoder(config),
            loss_fn=by_step,
            optimizer=optax.set_to_zero(),
            sample_batch=make_batches(ROWS, 1)[0],
            mesh=jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
            accumulate=2,
            schedule=schedule,
        )
        return [float(engine.step(b)["loss"]) for b in make_batches(ROWS, 5)]

    right = run("1f1b", data=2)
    assert run("pipedream_2bw", data=2, pipe=2)[1:] == pytest.approx(
        right[:-1], rel=1e-5
    )


def test_steps_at_the_beginning_may_have_no_delay() -> None:
    case = Case(PipeDream2BW(synchronous_steps=3), 2, 2, blocks=2)
    batches = make_batches(ROWS, 3)
    one, other = case.engine(), case.engine("1f1b")
    right = [float(other.step(batch)["loss"]) for batch in batches]
    assert [float(one.step(b)["loss"]) for b in batches] == pytest.approx(
        right, rel=1e-6
    )
    found, plain = (jax.device_get(x.state.params) for x in (one, other))
    assert problems.distance(found, plain) <= 1e-6


def test_bf16_learns() -> None:
    case = Case(BW, 2, 2, blocks=2)
    engine = jaxpar.initialize(
        model=make_model(2, tied=True, remat="none"),
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-2),
        sample_batch=make_batches(ROWS, 1)[0],
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=2, pipe=2), jax.devices()[:4]),
        accumulate=case.accumulate,
        schedule=case.kind,
        precision="bf16",
    )
    losses = [float(engine.step(make_batches(ROWS, 1)[0])["loss"]) for _ in range(12)]
    assert losses[-1] < 0.8 * losses[1]
    dtypes = {x.dtype for x in jax.tree.leaves(engine.state.carried["params_before"])}
    assert dtypes == {jnp.dtype(jnp.bfloat16)}
