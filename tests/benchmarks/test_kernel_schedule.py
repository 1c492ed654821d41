"""Is the replay of a kernel's grid what a multiprocessor by multiprocessor count is?"""

import numpy as np
import pytest

from benchmarks.kernels.schedule import MULTIPROCESSORS, Spans, span, strided_span
from kernels_pallas.block_sparse_attention import BlockLayout, Tile, make_tile_work
from kernels_pallas.block_sparse_attention.lists import Lists


def triangle(rows: int) -> Lists:
    """Lists of a causal layout: rows of 1, 2, 3, ... tiles."""
    layout = BlockLayout(np.tri(rows, dtype=bool), 8)
    tokens = 8 * rows
    tile = Tile(8, 8)
    return make_tile_work(layout, tokens, tokens, causal=True, tile=tile).rows


def test_programs_go_to_the_first_free_multiprocessor() -> None:
    assert span([1.0] * MULTIPROCESSORS) == 1
    assert span([3.0] + [1.0] * MULTIPROCESSORS) == 3
    assert span([2.0] * MULTIPROCESSORS + [3.0, 1.0]) == 5


def test_a_persistent_program_has_every_132nd_item() -> None:
    times = np.arange(2 * MULTIPROCESSORS + 1)
    assert strided_span(times) == 0 + 132 + 264


def test_a_triangle_has_its_tail_at_the_end_of_the_sequence() -> None:
    lists = triangle(2 * MULTIPROCESSORS)
    mean = lists.count.sum() / MULTIPROCESSORS
    found = Spans.of(lists, 1)
    # Of rows 1 to 264 in order, a multiprocessor has n and n + 132.
    assert found.by_row == pytest.approx((132 + 264) / mean)
    # Longest first, 265 - n and n.
    assert found.longest_first == pytest.approx(265 / mean)
    assert found.persistent == pytest.approx((264 + 132) / mean)


def test_starting_is_paid_by_every_program_or_once() -> None:
    lists = triangle(2 * MULTIPROCESSORS)
    mean = lists.count.sum() / MULTIPROCESSORS
    free, paid = Spans.of(lists, 1), Spans.of(lists, 1, start=1.0)
    assert paid.longest_first == pytest.approx(free.longest_first + 2 / mean)
    assert paid.persistent == pytest.approx(free.persistent + 1 / mean)


def test_heads_alternate_within_an_item() -> None:
    """Two heads are a grid of items with both heads of the longest first."""
    lists = triangle(MULTIPROCESSORS // 2)
    found = Spans.of(lists, 2)
    assert found.longest_first * lists.count.sum() * 2 == pytest.approx(
        MULTIPROCESSORS * lists.count.max()
    )
