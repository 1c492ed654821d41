import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.data import best_fit


def best_fit_one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """The rooms that are left, sorted, by the definition of best-fit decreasing."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [index for index, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity)
            fitting = [len(rooms) - 1]
        best = min(fitting, key=lambda index: rooms[index])
        rooms[best] -= length
    return sorted(rooms)


@settings(max_examples=40)
@given(data=st.data(), capacity=st.integers(1, 40))
def test_rows_are_those_of_best_fit(data, capacity):
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60))
    rows = best_fit.pack(np.array(lengths), capacity)
    filled = np.bincount(rows, weights=lengths)
    assert (filled > 0).all()
    assert sorted(capacity - filled) == best_fit_one_by_one(lengths, capacity)


def test_packing_in_parts_keeps_their_rows_apart(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 20, 1000)
    monkeypatch.setattr(best_fit, "_AT_ONCE", 300)
    rows = best_fit.pack(lengths, 20)
    parts = [rows[first : first + 300] for first in range(0, 1000, 300)]
    for before, after in itertools.pairwise(parts):
        assert before.max() + 1 == after.min()
    assert np.bincount(rows, weights=lengths).max() <= 20
    assert len(np.unique(rows)) == rows.max() + 1


@pytest.mark.slow
def test_million_documents_are_packed_in_seconds():
    lengths = np.random.default_rng(0).geometric(1 / 300, 1 << 20).clip(1, 2049)
    rows = best_fit.pack(lengths, 2049)
    assert 1 - lengths.sum() / ((rows.max() + 1) * 2049) < 1e-3
