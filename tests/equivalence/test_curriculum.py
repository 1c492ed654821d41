"""Do rows and batches that grow train as a plain loop over the same cut batches?"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar.data import BatchWarmup, Curriculum, GrowthInSteps, Loader, Tokens, Windows
from jaxpar.data.batch_sizes import as_sizes
from jaxpar.data.curriculum import other_shapes
from tests.equivalence.cut_batches import make_engine, plainly
from tests.equivalence.problems import distance

TOKENS = Tokens(
    (np.random.default_rng(0).integers(0, 32, 4000, np.int32),), files=("random",)
)
LENGTHS = GrowthInSteps((4, 8, 16), until=(2, 4))
WARMUP = BatchWarmup(start=8, increment=8, samples=24, end=16)
BY_STEP = [(8, 4), (8, 4), (8, 8), (16, 8), (16, 16), (16, 16)]
"""Rows and length."""


def make_loader() -> Curriculum:
    rows = Windows(TOKENS, seq_len=16)
    return Curriculum(Loader(rows, batch_size=WARMUP, shuffle=False), LENGTHS)


def make(**axes: Any) -> jaxpar.Engine:
    given = {k: axes.pop(k) for k in ("zero", "accumulate") if k in axes}
    sample = make_loader().sample_batch
    others = other_shapes(sample, LENGTHS, as_sizes(WARMUP))
    return make_engine(axes, sample_batch=sample, other_shapes=others, **given)


def by_hand() -> Iterator[dict[str, np.ndarray]]:
    windows, row = TOKENS.parts[0], 0
    for rows, length in BY_STEP:
        starts = (row + np.arange(rows)) * 16
        yield {"tokens": windows[starts[:, None] + np.arange(length + 1)]}
        row += rows


@functools.cache
def right() -> tuple[list[float], Any]:
    return plainly(list(by_hand()))


MESHES: dict[str, dict[str, Any]] = {
    "ZeRO 3, tensor": {"zero": 3, "data": 2, "tensor": 2, "accumulate": 2},
    "ZeRO 0": {"zero": 0, "data": 4},
    "ZeRO 1": {"zero": 1, "data": 4, "accumulate": 2},
    "ZeRO 2": {"zero": 2, "data": 4, "accumulate": 2},
    "ZeRO 3": {"zero": 3, "data": 8},
    "pipe": {"zero": 1, "data": 2, "pipe": 2, "accumulate": 4},
}


@pytest.mark.parametrize("name", MESHES)
def test_trains_as_a_plain_loop_over_the_cut_batches(
    name: str, compiled: list[str], tmp_path: Path
) -> None:
    """One half of the run by an engine that is restored, equal to the bit."""
    losses, params = right()
    engine, loader = make(**MESHES[name]), make_loader()
    compiled.clear()
    found = []
    for step in range(len(BY_STEP)):
        if step == 3:
            engine.save(tmp_path, data=loader)
        found.append(float(engine.step(next(loader))["loss"]))
    assert found == pytest.approx(losses, rel=1e-5)
    assert distance(engine.state.params, params) < 1e-5
    assert compiled.count("jit(step)") == len(set(BY_STEP))
    engine.wait()
    again, loader = make(**MESHES[name]), make_loader()
    again.restore(tmp_path, data=loader)
    rest = [float(again.step(next(loader))["loss"]) for _ in range(3)]
    assert rest == found[3:]
    for one, other in zip(
        jax.tree.leaves(again.state.params),
        jax.tree.leaves(engine.state.params),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
