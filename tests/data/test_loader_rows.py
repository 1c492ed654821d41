"""Do changes of the batch size, and rows left out, keep to the stream?"""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.data import Loader, Tokens


def make_loader(num_tokens: int, **given: Any) -> Loader:
    tokens = Tokens((np.arange(num_tokens, dtype=np.int32),), files=("counting",))
    return Loader(tokens, **{"seq_len": 1, **given})


def take(loader: Loader, count: int) -> list[list[int]]:
    """The first token of each row of the next batches."""
    batches = itertools.islice(loader, count)
    return [batch["tokens"][:, 0].tolist() for batch in batches]


def check_rows_of_any_batch_sizes(
    num_examples: int,
    shuffle: bool,
    parts: list[tuple[int, int]],
    intervals: list[tuple[int, int]],
    processes: int,
) -> None:
    def make(batch_size: int, **given: Any) -> Loader:
        given |= {"batch_size": batch_size, "shuffle": shuffle}
        return make_loader(num_examples + 1, **given)

    seen: list[int] = []
    state: dict[str, Any] = {}
    for batch_size, count in parts:
        loaders = [
            make(batch_size, process_index=index, process_count=processes)
            for index in range(processes)
        ]
        for loader in loaders:
            loader.leave_out(intervals)
            if state:
                loader.set_state(json.loads(json.dumps(state)), change=True)
        for batch in zip(*(take(each, count) for each in loaders), strict=True):
            seen += itertools.chain(*batch)
        state = loaders[-1].get_state()
        assert all(each.get_state() == state for each in loaders)

    epochs = take(make(num_examples), 400 // num_examples)
    stream = list(itertools.chain(*epochs))
    left_out = {row for start, stop in intervals for row in range(start, stop)}
    kept = [row for row in range(len(stream)) if row not in left_out][: len(seen)]
    assert seen == [stream[row] for row in kept]
    assert state["rows"] == kept[-1] + 1


@pytest.mark.parametrize("cases", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_rows_of_any_batch_sizes_are_the_stream_without_those_left_out(cases):
    # Grain's shuffle takes milliseconds a row of a short epoch.
    counts = st.tuples(st.sampled_from([10, 20, 30]), st.integers(1, 2))
    interval = st.tuples(st.integers(0, 120), st.integers(1, 40))

    @settings(max_examples=cases)
    @given(
        num_examples=st.integers(60, 80),
        shuffle=st.booleans(),
        parts=st.lists(counts, min_size=2, max_size=3),
        intervals=st.lists(interval.map(lambda x: (x[0], sum(x))), max_size=3),
        processes=st.sampled_from([1, 2]),
    )
    def check(**drawn: Any) -> None:
        check_rows_of_any_batch_sizes(**drawn)

    check()


def test_rows_left_out_are_not_read_though_they_were_read_ahead():
    loader = make_loader(9, batch_size=2, repeat=False)
    assert take(loader, 1) == [[0, 1]]
    loader.leave_out([(2, 4), (6, 7)])
    assert len(loader) == 2
    assert take(loader, 9) == [[4, 5]]
    loader.leave_out([])
    assert len(loader) == 4
    assert take(loader, 9) == [[6, 7]]


def test_whole_batches_left_out_leave_the_others_as_they_were():
    expected = take(make_loader(30, batch_size=4), 12)
    loader = make_loader(30, batch_size=4)
    loader.leave_out([(4, 12), (36, 40)])
    kept = [batch for index, batch in enumerate(expected) if index not in (1, 2, 9)]
    assert take(loader, 9) == kept
    assert loader.rows == 48


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"seq_len": 2}, {"shuffle": False}, {"num_tokens": 34}]
)
def test_state_of_another_stream_may_start_it(change):
    made: dict[str, Any] = {"num_tokens": 33, "batch_size": 4, "seq_len": 4}
    state = {**make_loader(**made).get_state(), "rows": 12}
    loader = make_loader(**{**made, **change})
    expected = take(loader, 2)
    loader.set_state(state, change=True)
    assert loader.rows == 0
    assert take(loader, 2) == expected


def test_state_saved_in_batches_goes_on_at_its_row():
    loader = make_loader(33, batch_size=4)
    state = loader.get_state()
    del state["rows"]
    loader.set_state({**state, "position": 3})
    assert loader.rows == 12
