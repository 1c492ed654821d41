"""Are rows cut to the length of their step, and is the position theirs?"""

import json
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.data import BatchWarmup, Curriculum, Growth, GrowthInSteps, Loader, Tokens
from jaxpar.data.batch_sizes import as_sizes
from jaxpar.data.curriculum import cut, other_shapes
from jaxpar.data.growth import Growing

LENGTHS = GrowthInSteps((2, 4, 8), until=(2, 3))
BY_STEP = 2, 2, 4, 8, 8, 8


def whole(**change: Any) -> Loader:
    tokens = Tokens((np.arange(200, dtype=np.uint8),), files=("counting",))
    return Loader(tokens, **{"seq_len": 8, "batch_size": 4, **change})


def make(lengths: Growing = LENGTHS, **change: Any) -> Curriculum:
    return Curriculum(whole(**change), lengths)


def test_rows_are_the_first_tokens_of_whole_ones() -> None:
    rows, right = make(), whole()
    for length in BY_STEP:
        found, other = next(rows)["tokens"], next(right)["tokens"]
        np.testing.assert_array_equal(found, other[:, : length + 1])
    assert (rows.steps, rows.rows) == (6, 24)
    assert rows.sample_batch == right.sample_batch
    assert (rows.batch_size, rows.padding, rows.source) == (4, 0, rows.loader.source)


def test_weights_are_cut_with_their_targets_and_others_stay() -> None:
    batch = {
        "tokens": np.ones((3, 9), np.int32),
        "weights": np.ones((3, 8)),
        "source": np.ones(3),
        "image": jax.ShapeDtypeStruct((3, 32, 32), np.uint8),
        "mask": jax.ShapeDtypeStruct((3, 9, 2), np.uint8),
    }
    shapes = {name: leaf.shape for name, leaf in cut(batch, 4, 8).items()}
    assert shapes == {
        "tokens": (3, 5),
        "weights": (3, 4),
        "source": (3,),
        "image": (3, 32, 32),
        "mask": (3, 5, 2),
    }


def test_position_goes_on_at_the_same_step_and_row() -> None:
    rows, other = make(), make()
    for _ in range(3):
        next(rows)
    state = json.loads(json.dumps(rows.get_state()))
    assert state["steps"] == 3
    other.set_state(state)
    np.testing.assert_array_equal(next(other)["tokens"], next(rows)["tokens"])


def test_position_of_other_lengths_is_refused_unless_changed() -> None:
    rows = make()
    for _ in range(3):
        next(rows)
    state = rows.get_state()
    other = make(GrowthInSteps((2, 8), until=(4,)))
    with pytest.raises(ValueError, match=r"of rows with lengths=.* change=True"):
        other.set_state(state)
    other.set_state(state, change=True)
    assert (other.steps, other.rows, next(other)["tokens"].shape) == (3, 12, (4, 3))
    with pytest.raises(ValueError, match="of rows with lengths=None"):
        other.set_state(whole().get_state())
    other.set_state({**whole().get_state(), "rows": 8}, change=True)
    assert (other.steps, other.rows) == (0, 8)
    plain = whole()
    with pytest.raises(ValueError, match=r"stream of batches: .*lengths was"):
        plain.set_state(state)
    plain.set_state(state, change=True)
    assert plain.rows == 12


def test_rows_that_are_left_out_take_no_step() -> None:
    rows = make(shuffle=False)
    rows.leave_out([(4, 8)])
    next(rows)
    assert next(rows)["tokens"].shape == (4, 3)
    assert (rows.steps, rows.rows) == (2, 12)


def test_lengths_that_end_elsewhere_are_refused() -> None:
    with pytest.raises(
        ValueError, match="lengths: they end at 16, but no rows have 16"
    ):
        make(Growth(8, 16, steps=3, multiple=8))


def test_other_shapes_are_those_that_come() -> None:
    sample = whole().sample_batch
    found = other_shapes(sample, LENGTHS, as_sizes(4))
    assert [x["tokens"].shape for x in found] == [(4, 3), (4, 5)]
    warmup = BatchWarmup(start=1, increment=1, samples=4, end=3)
    found = other_shapes(sample, None, warmup)
    assert [x["tokens"].shape for x in found] == [(1, 9), (2, 9)]
    found = other_shapes(sample, LENGTHS, warmup)
    rows = make(batch_size=warmup)
    shapes = dict.fromkeys(next(rows)["tokens"].shape for _ in range(9))
    assert [x["tokens"].shape for x in found] == [*shapes][:-1]
    assert other_shapes(sample, None, as_sizes(4)) == ()
