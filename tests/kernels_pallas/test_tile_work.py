"""Does tile work cover each active block once, by rows and by columns, and no other?"""

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_pallas.block_sparse_attention import (
    BlockLayout,
    Tile,
    TileWork,
    make_tile_work,
)
from kernels_pallas.block_sparse_attention.lists import Lists, merge_heads
from tests.kernels_pallas.oracle import visible_mask


def tile_work_of(*args: Any, **options: Any) -> TileWork:
    with warnings.catch_warnings(action="ignore"):  # of coarse tiles
        return make_tile_work(*args, **options)


@st.composite
def cases(draw: st.DrawFn) -> tuple[BlockLayout, dict[str, Any]]:
    block = draw(st.sampled_from([4, 8, 16, 32]))
    tile = Tile(*(draw(st.sampled_from([8, 16, 32])) for _ in range(2)))
    causal = draw(st.booleans())
    blocks_q = draw(st.integers(1, 9))
    blocks_k = blocks_q if causal else draw(st.integers(1, 9))
    heads = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    blocks = rng.random((heads, blocks_q, blocks_k)) < draw(st.floats(0, 1))
    cut_q = draw(st.integers(0, block - 1))
    seq_q = blocks_q * block - cut_q
    seq_k = seq_q if causal else blocks_k * block - draw(st.integers(0, block - 1))
    longest = draw(st.sampled_from([None, 1, 2, 5]))
    options = {"causal": causal, "tile": tile, "longest": longest}
    return BlockLayout(blocks, block), {"seq_q": seq_q, "seq_k": seq_k, **options}


def covered(work: TileWork, lists: Lists, *, transposed: bool) -> np.ndarray:
    """How often the items of a tile work's lists reach each query and key."""
    heads = len(lists.row)
    shape = (heads, work.tiles_q * work.tile.q, work.tiles_k * work.tile.k)
    found = np.zeros(shape, int)
    for head in range(heads):
        for item, row in enumerate(lists.row[head]):
            first, count = lists.start[head, item], lists.count[head, item]
            for at in range(first, first + count):
                assert lists.tile_row[head, at] == row
                q, k = row, lists.column[head, at]
                q, k = (k, q) if transposed else (q, k)
                needs_no_mask = at - first < lists.full[head, item]
                found[head] += elements(work, q, k, lists.mask[head, at], needs_no_mask)
    return found[:, : work.seq_q, : work.seq_k]


def elements(
    work: TileWork, q: int, k: int, mask: int, needs_no_mask: bool
) -> np.ndarray:
    rows, columns = np.indices((work.tiles_q * work.tile.q, work.tiles_k * work.tile.k))
    inside = (rows // work.tile.q == q) & (columns // work.tile.k == k)
    if needs_no_mask:
        assert work.masks[mask].all()
        return inside
    blocks = work.masks[mask]
    size_q, size_k = work.tile.q // blocks.shape[0], work.tile.k // blocks.shape[1]
    shown = blocks[rows % work.tile.q // size_q, columns % work.tile.k // size_k]
    return inside & shown & ((columns <= rows) | (not work.causal))


@given(cases())
def test_every_visible_pair_is_reached_once_and_no_other(case) -> None:
    layout, options = case
    work = tile_work_of(layout, **options)
    want = visible_mask(
        layout, options["seq_q"], options["seq_k"], causal=options["causal"]
    )
    want = np.broadcast_to(want, (len(layout.blocks), *want.shape[1:]))
    for lists, transposed in ((work.rows, False), (work.columns, True)):
        found = covered(work, lists, transposed=transposed)
        np.testing.assert_array_equal(np.broadcast_to(found, want.shape), want)


@given(cases())
def test_every_row_has_its_items_longest_first(case) -> None:
    layout, options = case
    work = tile_work_of(layout, **options)
    for lists, rows in ((work.rows, work.tiles_q), (work.columns, work.tiles_k)):
        for head in range(len(lists.row)):
            there = lists.row[head] >= 0
            items = lists.row[head][there]
            assert set(items) == set(range(rows)), "one for a row that sees nothing too"
            count = lists.count[head][there]
            assert (np.diff(count) <= 0).all()
            if options["longest"] is not None:
                assert count.max() <= options["longest"]
            assert (lists.count[head][~there] == 0).all()


@given(cases())
def test_pieces_of_a_row_are_its_partial_results(case) -> None:
    layout, options = case
    work = tile_work_of(layout, **options)
    for lists in (work.rows, work.columns):
        for head, row in enumerate(lists.row):
            for item, part in zip(row, lists.part[head], strict=True):
                alone = (row == item).sum() == 1
                if item >= 0:
                    assert (part < 0) == alone
                if part >= 0:
                    split = lists.part_row[head, part]
                    assert lists.split_row[head, split] == item
            parts = lists.part[head][lists.part[head] >= 0]
            is_there = lists.part_row[head] < lists.split_row.shape[1]
            assert sorted(parts) == list(range(is_there.sum()))


@given(cases(), st.integers(1, 3), st.sampled_from([None, 1, 3]))
def test_groups_have_the_tiles_of_their_heads(case, group, longest) -> None:
    layout, options = case
    work = tile_work_of(layout, **options)
    lists, num_columns = work.columns, work.tiles_q
    heads = len(lists.row)
    if heads > 1 and heads % group:
        group = heads
    sizes = {"num_rows": work.tiles_k, "num_columns": num_columns}
    merged = merge_heads(lists, group, **sizes, longest=longest)
    assert len(merged.row) == max(1, heads // group)
    for number in range(len(merged.row)):
        members = [(number * group + h) % heads for h in range(group)]
        want = [
            (row, h * num_columns + column, mask, full)
            for h, head in enumerate(members)
            for row, column, mask, full in tiles_of(lists, head)
        ]
        assert tiles_of(merged, number) == sorted(want)
    if longest is not None:
        assert merged.count.max() <= longest


def tiles_of(lists: Lists, head: int) -> list[tuple[int, int, int, bool]]:
    """Row, column, mask and whether it needs none, of the tiles of a head's items."""
    found = []
    for item, row in enumerate(lists.row[head]):
        first, count = int(lists.start[head, item]), int(lists.count[head, item])
        for at in range(first, first + count):
            assert lists.tile_row[head, at] == row
            column, mask = int(lists.column[head, at]), int(lists.mask[head, at])
            full = at - first < lists.full[head, item]
            found.append((int(row), column, mask, bool(full)))
    return sorted(found)


def test_long_rows_are_split_by_default() -> None:
    """A row of 64 tiles among rows of 2 does not outlast the rest."""
    blocks = np.eye(64, dtype=bool)
    blocks[0] = blocks[:, 0] = True
    work = make_tile_work(
        BlockLayout(blocks, 32), 2048, 2048, causal=False, tile=Tile(32, 32)
    )
    assert work.rows.count.max() == 16
    assert work.rows.num_parts == work.columns.num_parts == 4
    causal = BlockLayout(np.ones((64, 64), bool), 32)
    work = make_tile_work(causal, 2048, 2048, causal=True, tile=Tile(32, 32))
    assert work.rows.num_parts == 0, "rows of a triangle are not long"


def test_heads_that_are_alike_share_their_lists() -> None:
    blocks = np.tile(np.tri(4, dtype=bool), (3, 1, 1))
    work = make_tile_work(
        BlockLayout(blocks, 16), 64, 64, causal=True, tile=Tile(16, 16)
    )
    assert work.num_heads == 1


def test_fractions_are_of_blocks_and_of_tiles() -> None:
    layout = BlockLayout(np.eye(8, dtype=bool), 16)
    work = tile_work_of(layout, 128, 128, causal=True, tile=Tile(64, 64))
    assert (work.active_blocks, work.active_tiles) == (1 / 8, 1 / 2)


def test_blocks_that_coarsen_badly_are_warned_of() -> None:
    layout = BlockLayout(np.eye(64, dtype=bool), 16)
    with pytest.warns(UserWarning, match=r"1\.6% of blocks .* 12\.5% of tiles"):
        make_tile_work(layout, 1024, 1024, causal=True, tile=Tile(128, 128))


@pytest.mark.parametrize(("block", "size"), [(16, 64), (128, 64), (48, 48)])
def test_tile_is_what_suits_a_cpu(block: int, size: int) -> None:
    layout = BlockLayout(np.ones((4, 4), bool), block)
    work = make_tile_work(layout, 4 * block, 4 * block, causal=False)
    assert work.tile == Tile(size, size)


def test_tile_work_is_made_once() -> None:
    layout = BlockLayout(np.tri(2, dtype=bool), 16)
    made = [
        make_tile_work(layout, 32, 32, causal=True, tile=Tile(16, 16)) for _ in "ab"
    ]
    assert made[0] is made[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_q": 65}, r"seq_q=65: the layout has 4 blocks of 16 .* 49 to 64"),
        ({"seq_k": 48, "causal": False}, "seq_k=48: the layout has 4 blocks"),
        ({"seq_k": 63}, "causal=True with seq_q=64 and seq_k=63"),
        ({"tile": Tile(24, 16)}, r"tile.q=24: .* blocks of 16; .* 32, 64, 128"),
        ({"tile": Tile(16, 0)}, "tile.k=0"),
        ({"longest": 0}, "longest=0: must be 1 tile or more"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict, message: str) -> None:
    layout = BlockLayout(np.ones((4, 4), bool), 16)
    given = {"seq_q": 64, "seq_k": 64, "causal": True, "tile": Tile(16, 16), **options}
    with pytest.raises(ValueError, match=message):
        make_tile_work(layout, **given)


@pytest.mark.parametrize(
    ("blocks", "block", "error", "message"),
    [
        (np.ones((2, 2)), 16, TypeError, "dtype float64"),
        (np.ones(2, bool), 16, ValueError, r"shape \(2,\); it must be"),
        (np.ones((0, 2), bool), 16, ValueError, r"shape \(0, 2\)"),
        (np.ones((2, 2), bool), 0, ValueError, "block=0"),
    ],
)
def test_what_is_no_layout_is_refused(blocks, block, error, message) -> None:
    with pytest.raises(error, match=message):
        BlockLayout(blocks, block)
