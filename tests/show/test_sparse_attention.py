"""Does a layout's picture show its blocks, and what share of the work is left?"""

import matplotlib.image
import numpy as np
import pytest

from jaxpar.cli.main import main
from jaxpar.show.sparse_attention import chart, draw, report
from jaxpar.sparse_attention import BigBird, LocalSlidingWindow, make_layout
from kernels_pallas.block_sparse_attention import BlockLayout

EYE = BlockLayout(np.eye(8, dtype=bool), 16)


def test_cell_is_a_block_where_all_fit() -> None:
    layout = make_layout(LocalSlidingWindow(1), 64)
    assert chart(layout, 0, 80) == ["██      ", "████    ", "  ████  ", "    ████"]


def test_cell_is_the_darker_the_more_blocks_of_it_are_active() -> None:
    blocks = np.zeros((4, 4), bool)
    blocks[:2, :2] = True
    blocks[2:, 0] = True
    blocks[2, 2] = True
    assert chart(BlockLayout(blocks, 16), 0, 5) == ["██  ", "▒▒░░"]


def test_cells_at_the_edge_count_only_the_blocks_that_are_there() -> None:
    assert chart(BlockLayout(np.ones((3, 3), bool), 16), 0, 5) == ["████", "████"]


def test_report_says_what_is_left_to_do() -> None:
    lines = report(EYE, 0, 80, causal=True).splitlines()
    assert lines[:4] == [
        "128 tokens, blocks of 16, 1 heads, all heads alike",
        "active: 12.5% of 8 x 8 blocks, 50.0% of tiles of 64, 100.0% of tiles of 128",
        "head 0, queries down and keys across; a cell is a block",
        "",
    ]
    assert len(lines) == 12


def test_report_tells_of_keys_that_are_more_than_queries() -> None:
    layout = BlockLayout(np.ones((3, 5), bool), 64)
    lines = report(layout, 0, 80, causal=False).splitlines()
    assert lines[0] == "192 x 320 tokens, blocks of 64, 1 heads, all heads alike"
    assert lines[1].startswith("active: 100.0% of 3 x 5 blocks, 100.0% of tiles of 64")
    assert lines[4:] == [10 * "█"] * 3


def test_report_leaves_tiles_out_that_do_not_nest() -> None:
    layout = BlockLayout(np.eye(2, dtype=bool), 96)
    assert "tiles" not in report(layout, 0, 80, causal=False)


def test_heads_that_differ_are_said_and_drawn_one_at_a_time() -> None:
    layout = make_layout(BigBird(2, different_layout_per_head=True), 256)
    assert "2 heads, heads differ" in report(layout, 0, 80, causal=False)
    assert chart(layout, 0, 80) != chart(layout, 1, 80)
    with pytest.raises(ValueError, match="--head 2: the layout has heads 0 to 1"):
        report(layout, 2, 80, causal=False)


def test_drawing_has_the_blocks_in_their_places(tmp_path) -> None:
    path = tmp_path / "layout.png"
    draw(EYE, 0, path)
    image = matplotlib.image.imread(path)[..., :3]
    blue = (image[..., 2] > image[..., 0] + 0.3).astype(float)
    rows, columns = np.nonzero(blue)
    top, left = rows.min(), columns.min()
    size = (rows.max() - top + 1) / 8
    for row in range(8):
        for column in range(8):
            y, x = (
                int(start + (at + 0.5) * size)
                for start, at in ((top, row), (left, column))
            )
            assert blue[y, x] == (row == column), (row, column)


def test_command_shows_and_draws(tmp_path, capsys) -> None:
    path = tmp_path / "layout.png"
    args = ["layout", "--seq-len", "64", "--png", str(path)]
    main([*args, "sliding", "--num-heads", "2", "--attention", "bidirectional"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "64 tokens, blocks of 16, 2 heads, all heads alike"
    assert shown[4].startswith("████")
    assert path.stat().st_size > 1000


def test_command_says_what_is_no_layout(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["layout", "--seq-len", "100", "dense", "--num-heads", "2"])
    assert caught.value.code == 2
    assert "pad the sequence to 112 tokens" in capsys.readouterr().err
