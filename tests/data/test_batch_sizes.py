"""Is a stream divided into batches that grow by the rows before them?"""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data import BatchWarmup, Loader, Tokens
from jaxpar.data.batch_sizes import OneSize, as_sizes


@given(
    start=st.integers(1, 9),
    increment=st.integers(1, 5),
    parts=st.integers(1, 6),
    samples=st.integers(1, 300),
)
def test_batches_follow_one_another_as_in_a_plain_loop(
    start: int, increment: int, parts: int, samples: int
) -> None:
    end = start + parts * increment
    warmup = BatchWarmup(start, increment, samples, end)
    right, rows = [], 0
    for _ in range(60):
        size = min(start + rows * parts // samples * increment, end)
        right.append((rows, size))
        rows += size
    assert [warmup.place(0, index) for index in range(60)] == right
    for number in (1, 7, 30):
        found = [warmup.place(right[number][0], index) for index in range(20)]
        assert found == right[number : number + 20]
    assert {size for _, size in right} <= set(warmup.sizes)


def test_one_size_is_the_number() -> None:
    assert as_sizes(4) == OneSize(4)
    assert (OneSize(4).place(8, 3), OneSize(4).identity()) == ((20, 4), 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start": 0}, "start=0 must be at least 1 row"),
        ({"samples": 0}, "samples=0 must be at least 1 row"),
        ({"increment": 3}, "start=2 must be below end=6 by a multiple of increment=3"),
        ({"start": 6}, "start=6 must be below end=6"),
    ],
)
def test_sizes_that_do_not_lead_to_the_end_are_refused(change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BatchWarmup(**{"start": 2, "increment": 2, "samples": 8, "end": 6, **change})


WARMUP = BatchWarmup(start=2, increment=2, samples=8, end=6)


def make_loader(**change: Any) -> Loader:
    tokens = Tokens((np.arange(50, dtype=np.int32),), files=("counting",))
    given = {"batch_size": WARMUP, "seq_len": 1, "shuffle": False, **change}
    return Loader(tokens, **given)


@pytest.mark.parametrize("processes", [1, 2])
def test_loader_gives_the_rows_of_one_stream(processes: int) -> None:
    loaders = [
        make_loader(process_index=index, process_count=processes)
        for index in range(processes)
    ]
    batches = [
        np.concatenate([next(own)["tokens"][:, 0] for own in loaders]).tolist()
        for _ in range(5)
    ]
    assert [len(batch) for batch in batches] == [2, 2, 4, 6, 6]
    assert [*itertools.chain(*batches)] == [*range(20)]
    assert loaders[0].get_state()["rows"] == 20
    assert loaders[0].sample_batch["tokens"].shape == (6, 2)


def test_loader_goes_on_at_the_same_batch_and_without_rows_left_out() -> None:
    loader, other = make_loader(), make_loader()
    for _ in range(3):
        next(loader)
    state = loader.get_state()
    assert state["batch_size"] == WARMUP.identity()
    other.set_state(state)
    np.testing.assert_array_equal(next(other)["tokens"], next(loader)["tokens"])
    with pytest.raises(ValueError, match="another stream of batches: batch_size was"):
        make_loader(batch_size=6).set_state(state)
    fixed = make_loader(batch_size=6)
    fixed.set_state(state, change=True)
    assert next(fixed)["tokens"][0, 0] == 8
    other = make_loader()
    other.leave_out([(2, 4)])
    found = [next(other)["tokens"][:, 0].tolist() for _ in range(3)]
    assert found == [[0, 1], [4, 5], [6, 7, 8, 9]]


def test_loader_refuses_sizes_that_it_cannot_have() -> None:
    with pytest.raises(ValueError, match="batch_size=2 must be a multiple of process_"):
        make_loader(process_index=0, process_count=4)
    for change in ({"repeat": False}, {"num_batches": 3}):
        with pytest.raises(ValueError, match="grows, which is for an endless stream"):
            make_loader(**change)
