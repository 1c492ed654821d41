"""Are windows, global blocks and random blocks what their definitions say?"""

import numpy as np
import pytest

from jaxpar.sparse_attention import blocks


@pytest.mark.parametrize("size", [1, 3, 5])
def test_window_is_the_band_around_the_diagonal(size):
    found = blocks.sliding_window(size, 6)
    ones = np.ones((6, 6), bool)
    half = size // 2
    np.testing.assert_array_equal(found, np.tril(ones, half) & np.triu(ones, -half))


def test_window_beyond_the_sequence_is_refused():
    blocks.sliding_window(7, 4)
    with pytest.raises(ValueError, match=r"num_sliding_window_blocks=9: .* at most 7"):
        blocks.sliding_window(9, 4)


@pytest.mark.parametrize("sees_all", [False, True])
def test_global_blocks_are_columns_and_rows_if_they_see_all(sees_all):
    found = np.zeros((5, 5), bool)
    blocks.add_global(found, 1, 3, sees_all=sees_all)
    assert found[:, 1:3].all()
    assert found[1:3].all() == sees_all
    assert found.sum() == (10 + 6 if sees_all else 10)


@pytest.mark.parametrize("is_causal", [False, True])
def test_random_blocks_are_as_many_as_asked_and_none_is_drawn_twice(is_causal):
    found = blocks.random_blocks(3, 8, seed=(1, 2), is_causal=is_causal)
    wanted = [min(3, row + 1) if is_causal else 3 for row in range(8)]
    assert found.sum(1).tolist() == wanted
    assert not is_causal or not np.triu(found, 1).any()
    again = blocks.random_blocks(3, 8, seed=(1, 2), is_causal=is_causal)
    other = blocks.random_blocks(3, 8, seed=(1, 3), is_causal=is_causal)
    np.testing.assert_array_equal(found, again)
    assert (found != other).any()


def test_more_random_blocks_than_the_sequence_has_are_refused():
    assert not blocks.random_blocks(0, 4, seed=(0, 0), is_causal=False).any()
    for count in (5, -1):
        with pytest.raises(ValueError, match=f"num_random_blocks={count}: .* the 4"):
            blocks.random_blocks(count, 4, seed=(0, 0), is_causal=False)


def test_global_ranges_end_after_one_block_unless_their_ends_are_given():
    assert list(blocks.global_ranges((0, 3), None, 4)) == [(0, 1), (3, 4)]
    assert list(blocks.global_ranges((0, 3), (2, 4), 4)) == [(0, 2), (3, 4)]
    with pytest.raises(ValueError, match="blocks 3 to 5 are named, but the sequence"):
        list(blocks.global_ranges((3,), (6,), 4))


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: blocks.check_attention("sideways"), "attention='sideways': must be"),
        (
            lambda: blocks.check_attention("unidirectional", horizontal=True),
            "global blocks would see the future",
        ),
        (lambda: blocks.check_positive(num_heads=4, block=0), "block=0: must be 1"),
        (lambda: blocks.check_window(4), "must be odd.* here 5"),
        (lambda: blocks.check_window(-1), "num_sliding_window_blocks=-1: must be odd"),
        (lambda: blocks.check_global((-1,), None), r"\(-1,\): must be 0 or more"),
        (lambda: blocks.check_global((2, 5), (3, 5)), r"\(3, 5\): must hold, for each"),
        (lambda: blocks.check_global((2, 5), (3,)), "must hold, for each"),
    ],
)
def test_settings_out_of_range_are_refused(check, message):
    with pytest.raises(ValueError, match=message):
        check()
