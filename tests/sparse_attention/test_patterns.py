"""Are the patterns DeepSpeed's where it is right, and right where it is not?"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.sparse_attention import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    SparsityPattern,
    Variable,
    make_layout,
)

UNI = "unidirectional"
# Computed by DeepSpeed's sparsity_config.py: block 16, 256 tokens.
GOLDEN = np.load(Path(__file__).with_name("deepspeed_layouts.npz"))
PATTERNS = {
    "dense": Dense(4),
    "fixed_uni": Fixed(4, attention=UNI),
    "fixed_bi": Fixed(4, num_global_blocks=2),
    "fixed_bi_h": Fixed(4, horizontal_global_attention=True),
    "variable": Variable(2, local_window_blocks=(2, 4, 8), global_block_indices=(0, 5)),
    "variable_uni": Variable(2, local_window_blocks=(3,), attention=UNI),
    "longformer": BSLongformer(2, global_block_indices=(0, 4)),
    "sliding": LocalSlidingWindow(2),
    "bigbird_norandom": BigBird(2, num_random_blocks=0),
}


def blocks_of(pattern: SparsityPattern, seq_len: int) -> np.ndarray:
    return make_layout(pattern, seq_len).blocks


@pytest.mark.parametrize("name", PATTERNS)
def test_layout_is_deepspeeds(name: str) -> None:
    golden = GOLDEN[f"{name}-256"]
    np.testing.assert_array_equal(blocks_of(PATTERNS[name], 256), golden.astype(bool))


def test_all_golden_layouts_are_compared() -> None:
    assert {f"{name}-256" for name in PATTERNS} == set(GOLDEN)


@pytest.mark.parametrize(
    "pattern",
    [
        Dense(2, attention=UNI),
        Fixed(2, num_global_blocks=2, attention=UNI),
        Variable(2, num_random_blocks=3, attention=UNI),
        Variable(
            2,
            global_block_indices=(1,),
            global_block_end_indices=(4,),
            attention=UNI,
        ),
        BigBird(2, num_random_blocks=3, different_layout_per_head=True, attention=UNI),
        BSLongformer(2, global_block_indices=(5,), attention=UNI),
        LocalSlidingWindow(2),
    ],
    ids=repr,
)
def test_no_block_lies_in_the_future(pattern: SparsityPattern) -> None:
    blocks = blocks_of(pattern, 256)
    assert not np.triu(blocks, 1).any()
    assert blocks.diagonal(axis1=1, axis2=2).all(), "each sees at least itself"


@pytest.mark.parametrize("attention", [UNI, "bidirectional"])
@pytest.mark.parametrize("kind", [BigBird, Variable])
def test_random_blocks_follow_the_seed(kind: type, attention: str) -> None:
    def made(seed: int, **more: bool) -> np.ndarray:
        pattern = kind(3, num_random_blocks=2, seed=seed, attention=attention, **more)
        return blocks_of(pattern, 512)

    np.testing.assert_array_equal(made(0), made(0))
    assert (made(0) != made(1)).any()
    assert (made(0) == made(0)[:1]).all(), "heads are alike unless asked for"
    differ = made(0, different_layout_per_head=True)
    assert (differ[0] != differ[1]).any()


def test_random_blocks_are_as_many_as_asked_for_where_there_are_as_many() -> None:
    windowless = Variable(
        1, num_random_blocks=5, local_window_blocks=(1,), global_block_indices=()
    )
    rows = blocks_of(windowless, 1024)[0].sum(1)
    assert set(rows) <= {5, 6}, "the own block may be one of them"
    causal = Variable(
        1,
        num_random_blocks=5,
        local_window_blocks=(1,),
        global_block_indices=(),
        attention=UNI,
    )
    rows = blocks_of(causal, 1024)[0].sum(1)
    assert list(rows[:5]) == [1, 2, 3, 4, 5]


def test_heads_take_turns_at_what_is_global() -> None:
    pattern = Fixed(4, different_layout_per_head=True, num_different_global_patterns=4)
    columns = blocks_of(pattern, 256).all(1)
    assert [list(np.flatnonzero(c)) for c in columns] == [
        [3, 7, 11, 15],
        [2, 6, 10, 14],
        [1, 5, 9, 13],
        [0, 4, 8, 12],
    ]


def test_ranges_of_global_blocks_end_before_their_end() -> None:
    pattern = BSLongformer(
        1, global_block_indices=(0, 8), global_block_end_indices=(2, 11)
    )
    blocks = blocks_of(pattern, 256)[0]
    assert list(np.flatnonzero(blocks.all(0))) == [0, 1, 8, 9, 10]
    assert list(np.flatnonzero(blocks.all(1))) == [0, 1, 8, 9, 10]


@given(
    num_blocks=st.integers(1, 40),
    local=st.integers(1, 6),
    attention=st.sampled_from([UNI, "bidirectional"]),
)
def test_fixed_windows_cover_sequences_of_any_length(
    num_blocks: int, local: int, attention: str
) -> None:
    """A last window that is short has its own blocks, and a global one within it."""
    pattern = Fixed(1, num_local_blocks=local, attention=attention)
    blocks = blocks_of(pattern, 16 * num_blocks)[0]
    rows, columns = np.indices(blocks.shape)
    visible = columns <= rows if attention == UNI else np.ones_like(blocks)
    same_window = rows // local == columns // local
    assert blocks[same_window & visible].all()
    seen_by_all = [c for c in range(num_blocks) if blocks[:, c][visible[:, c]].all()]
    assert any(c >= num_blocks - local for c in seen_by_all)


@pytest.mark.parametrize("kind", [Variable, BSLongformer])
def test_patterns_take_lists(kind: type) -> None:
    """As DeepSpeed's are given them."""
    listed = {"global_block_indices": [0, 5], "global_block_end_indices": [2, 6]}
    given = {name: tuple(value) for name, value in listed.items()}
    assert kind(2, **listed) == kind(2, **given)
    assert make_layout(kind(2, **listed), 256) is make_layout(kind(2, **given), 256)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dense(0), "num_heads=0: must be 1 or more"),
        (lambda: Dense(1, block=0), "block=0: must be 1"),
        (lambda: Dense(1, attention="causal"), "attention='causal': must be"),
        (lambda: Fixed(1, num_global_blocks=3), "num_global_blocks=3: must divide"),
        (
            lambda: Fixed(1, attention=UNI, horizontal_global_attention=True),
            "global blocks would see the future",
        ),
        (
            lambda: Fixed(1, num_different_global_patterns=2),
            "different_layout_per_head=True",
        ),
        (lambda: Fixed(1, num_different_global_patterns=5), "must be from 1 to .* = 4"),
        (lambda: Variable(1, local_window_blocks=()), r"local_window_blocks=\(\)"),
        (
            lambda: make_layout(Variable(1, num_random_blocks=17), 256),
            "num_random_blocks=17: must be from 0 to the 16",
        ),
        (lambda: LocalSlidingWindow(1, num_sliding_window_blocks=4), "odd.* here 5"),
        (
            lambda: make_layout(BSLongformer(1, global_block_indices=(16,)), 256),
            "blocks 16 to 16 are named, but .* only blocks 0 to 15",
        ),
        (lambda: BSLongformer(1, global_block_indices=(-1,)), "must be 0 or more"),
        (
            lambda: BSLongformer(1, global_block_end_indices=(0,)),
            r"global_block_end_indices=\(0,\): .* a number above it",
        ),
        (
            lambda: make_layout(LocalSlidingWindow(1, 16, 33), 256),
            "num_sliding_window_blocks=33: reaches 16 blocks .* only 16; .* at most 31",
        ),
        (
            lambda: make_layout(BigBird(1, num_global_blocks=17), 256),
            "num_global_blocks=17: the sequence has only 16",
        ),
    ],
)
def test_what_is_no_pattern_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Fixed(1, num_different_global_patterns=0),
            "num_different_global_patterns=0: must be from 1 to .* = 4",
        ),
        (
            lambda: Variable(1, attention=UNI, horizontal_global_attention=True),
            "global blocks would see the future",
        ),
        (lambda: Variable(1, local_window_blocks=(4, 0)), r"blocks=\(4, 0\): must"),
        (lambda: BigBird(1, num_global_blocks=0), "num_global_blocks=0: must be 1"),
        (lambda: BigBird(1, num_sliding_window_blocks=2), "odd.* here 3"),
    ],
)
def test_numbers_that_make_no_pattern_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("pattern", "alike"),
    [
        (Dense(2), True),
        (Fixed(2, different_layout_per_head=True), True),
        (
            Fixed(2, different_layout_per_head=True, num_different_global_patterns=2),
            False,
        ),
        (Variable(2, different_layout_per_head=True), True),
        (Variable(2, different_layout_per_head=True, num_random_blocks=1), False),
        (BigBird(2), True),
        (BigBird(2, different_layout_per_head=True), False),
        (BSLongformer(2), True),
        (LocalSlidingWindow(2), True),
    ],
    ids=repr,
)
def test_heads_are_alike_unless_their_blocks_differ(
    pattern: SparsityPattern, alike: bool
) -> None:
    """A layout takes the first head's blocks for all that are alike."""
    assert pattern.heads_alike() == alike
    blocks = blocks_of(pattern, 256)
    assert (blocks == blocks[:1]).all() == alike
