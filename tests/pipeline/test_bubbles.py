"""Is what idle slots give, and what rings begin with, used by nothing?"""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxpar.pipeline import buffers as buffers
from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.pipeline.schedules.interleaved import make_interleaved
from jaxpar.pipeline.schedules.table import IDLE, Schedule
from tests.model.toys import (
    BATCHES,
    Block,
    RecurrentBlock,
    make_engine,
    make_mesh,
    make_model,
    params_of,
)


def stepped(schedule: str | Schedule, remat: str = "full", block: Any = Block) -> Any:
    engine = make_engine(
        make_model(num_blocks=5, remat=remat, block=block),
        mesh=make_mesh(pipe=2),
        accumulate=4,
        schedule=schedule,
        optimizer=optax.sgd(1.0),
    )
    metrics = engine.step(BATCHES[0])
    evaluated = engine.evaluate(BATCHES[0])["loss"]
    return params_of(engine), float(metrics["loss"]), float(evaluated)


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        ("1f1b", "full"),
        pytest.param("1f1b", "none", marks=pytest.mark.slow),
        pytest.param("interleaved", "full", marks=pytest.mark.slow),
        pytest.param("gpipe", "full", marks=pytest.mark.slow),
        ("zero_bubble", "full"),
    ],
)
def test_nan_in_every_bubble_changes_nothing(monkeypatch, schedule, remat):
    right = stepped(schedule, remat)
    monkeypatch.setattr(buffers, "UNUSED", float("nan"))
    found = stepped(schedule, remat)
    assert found[1:] == right[1:]
    assert np.isfinite(found[1])
    for one, other in zip(
        jax.tree.leaves(found[0]), jax.tree.leaves(right[0]), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def split(late: int) -> Schedule:
    """Two chunks a stage, gradients of weights some ticks behind their backwards."""
    base = make_interleaved(2, 4, 2)

    def padded(table: np.ndarray, before: int, behind: int) -> np.ndarray:
        around = ((before, behind), (0, 0), (0, 0))
        return np.pad(table, around, constant_values=IDLE)

    return dataclasses.replace(
        base,
        name="split",
        forward=padded(base.forward, 0, late),
        backward=padded(base.backward, 0, late),
        weight=padded(base.backward, late, 0)[:, :, None],
    )


@pytest.mark.slow
def test_backward_that_cannot_be_split_trains_alike_where_it_is_asked_for():
    asked = make_schedule("zero_bubble", 2, 4)
    right = stepped("1f1b", block=RecurrentBlock)
    assert_alike(stepped(asked, block=RecurrentBlock), right)


@pytest.mark.parametrize("late", [0, 3])
def test_users_table_with_chunks_and_a_split_backward_trains_alike(late):
    assert_alike(stepped(split(late)), stepped("gpipe"))


def assert_alike(found: Any, right: Any) -> None:
    assert found[1] == pytest.approx(right[1], rel=1e-6)
    for one, other in zip(
        jax.tree.leaves(found[0]), jax.tree.leaves(right[0]), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
