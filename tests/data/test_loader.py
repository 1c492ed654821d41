import itertools
import json
import sys
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.data import Loader, Tokens, Windows


def make_tokens(length: int, dtype: str = "int32") -> Tokens:
    return Tokens((np.arange(length).astype(dtype),), files=("counting",))


def take(loader: Loader, count: int) -> np.ndarray:
    return np.stack([batch["tokens"] for batch in itertools.islice(loader, count)])


def examples(rows: np.ndarray, seq_len: int) -> list[int]:
    """Read from rows of counting tokens which windows they are."""
    return (rows[..., 0] // seq_len).ravel().tolist()


def test_batch_is_windows_of_int32():
    loader = Loader(make_tokens(33, "uint16"), batch_size=4, seq_len=4)
    batch = next(loader)
    assert list(batch) == ["tokens"]
    assert batch["tokens"].dtype == np.int32
    assert batch["tokens"].shape == (4, 5)
    starts = batch["tokens"][:, :1]
    assert not (starts % 4).any()
    np.testing.assert_array_equal(batch["tokens"], starts + np.arange(5))


def test_sample_batch_has_the_global_shapes():
    loader = Loader(
        make_tokens(33), batch_size=4, seq_len=4, process_index=1, process_count=2
    )
    expected = {"tokens": jax.ShapeDtypeStruct((4, 5), np.int32)}
    assert loader.sample_batch == expected
    assert next(loader)["tokens"].shape == (2, 5)


@settings(max_examples=20)
@given(
    num_examples=st.integers(1, 40),
    seq_len=st.integers(1, 5),
    surplus=st.integers(0, 4),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_every_example_comes_once_an_epoch(num_examples, seq_len, surplus, seed, data):
    batch_size = data.draw(st.integers(1, num_examples))
    tokens = make_tokens(num_examples * seq_len + 1 + surplus % seq_len)
    loader = Loader(tokens, batch_size=batch_size, seq_len=seq_len, seed=seed)
    epochs = 2
    rows = take(loader, -(-epochs * num_examples // batch_size))
    seen = examples(rows, seq_len)
    for epoch in range(epochs):
        start = epoch * num_examples
        assert sorted(seen[start : start + num_examples]) == list(range(num_examples))


def test_order_changes_with_epoch_and_seed():
    def order(seed):
        loader = Loader(make_tokens(101), batch_size=50, seq_len=1, seed=seed)
        return [examples(rows, 1) for rows in take(loader, 4)]

    first = order(0)
    assert first == order(0)
    assert first[0] + first[1] != first[2] + first[3]
    assert first != order(1)


def test_order_is_the_one_that_saved_states_mean():
    # A Grain that shuffles otherwise would go on with other data, and not say so.
    loader = Loader(make_tokens(101), batch_size=10, seq_len=1, seed=7)
    assert examples(take(loader, 1), 1) == [28, 84, 89, 45, 64, 81, 17, 87, 10, 78]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_of_all_processes_are_the_global_batch(count):
    tokens = make_tokens(4 * 37 + 1)

    def make(index, of):
        return Loader(
            tokens,
            batch_size=8,
            seq_len=4,
            seed=3,
            process_index=index,
            process_count=of,
        )

    whole = take(make(0, 1), 12)
    shards = [take(make(index, count), 12) for index in range(count)]
    np.testing.assert_array_equal(np.concatenate(shards, axis=1), whole)


def test_processes_are_asked_of_jax_by_default(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    loader = Loader(make_tokens(33), batch_size=4, seq_len=4, shuffle=False)
    assert examples(take(loader, 1), 4) == [2, 3]


# 37 windows in batches of 8: an epoch ends within batches 4, 9 and 13.
@pytest.mark.parametrize("position", [0, 1, 4, 5, 9, 30])
@pytest.mark.parametrize("processes", [(1, 1), (1, 2), (4, 2)])
def test_state_resumes_exactly(position, processes):
    tokens = make_tokens(4 * 37 + 1)
    before, after = processes

    def make(count):
        return Loader(
            tokens, batch_size=8, seq_len=4, process_index=0, process_count=count
        )

    old = make(before)
    expected = take(Loader(tokens, batch_size=8, seq_len=4), position + 3)[position:]
    if position:
        take(old, position)
    state = json.loads(json.dumps(old.get_state()))
    new = make(after)
    next(new)
    new.set_state(state)
    assert new.get_state() == state
    np.testing.assert_array_equal(take(new, 3), expected[:, : 8 // after])
    assert new.get_state()["rows"] == new.rows == 8 * (position + 3)


def test_state_does_not_count_batches_read_ahead():
    loader = Loader(make_tokens(33), batch_size=4, seq_len=4)
    assert loader.rows == 0
    next(loader)
    assert loader.rows == 4


def test_state_is_the_rows_and_what_the_order_depends_on():
    tokens = make_tokens(33)
    loader = Loader(tokens, batch_size=4, seq_len=4, seed=5)
    assert loader.get_state() == {
        "rows": 0,
        "seed": 5,
        "shuffle": True,
        "batch_size": 4,
        "seq_len": 4,
        "num_tokens": 33,
        "sha256": tokens.sha256,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"batch_size": 2}, "batch_size was 4 and is 2"),
        ({"seq_len": 2}, "seq_len was 4 and is 2"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"source": make_tokens(34)}, "num_tokens was 33 and is 34; sha256 was '"),
        ({"seed": 1, "seq_len": 2}, "seed was 0 and is 1; seq_len was 4 and is 2"),
    ],
)
def test_state_of_another_stream_raises(change, message):
    settings = {"source": make_tokens(33), "batch_size": 4, "seq_len": 4}
    state = Loader(**settings).get_state()
    with pytest.raises(ValueError, match=f"another stream of batches: {message}"):
        Loader(**{**settings, **change}).set_state(state)


def test_state_saved_in_batches_goes_on_at_its_row():
    loader = Loader(make_tokens(33), batch_size=4, seq_len=4)
    state = loader.get_state()
    del state["rows"]
    loader.set_state({**state, "position": 3})
    assert loader.rows == 12


def test_state_that_lacks_an_entry_raises():
    loader = Loader(make_tokens(33), batch_size=4, seq_len=4)
    state = loader.get_state()
    del state["rows"], state["seed"]
    with pytest.raises(ValueError, match="state lacks rows, seed"):
        loader.set_state(state)


@pytest.mark.parametrize("rows", [-1, 9])
def test_state_beyond_the_pass_raises(rows):
    loader = Loader(make_tokens(33), batch_size=4, seq_len=4, repeat=False)
    state = {**loader.get_state(), "rows": rows}
    with pytest.raises(ValueError, match=f"rows={rows}, but .* has 8 rows"):
        loader.set_state(state)


def test_one_pass_is_in_file_order_and_again():
    # Eleven windows: the last three fill no batch.
    loader = Loader(make_tokens(45), batch_size=4, seq_len=4, repeat=False)
    assert len(loader) == 2
    for _ in range(2):
        assert examples(take(loader, 9), 4) == list(range(8))
    assert list(loader) != []


def test_ended_pass_stays_ended_until_looped_over():
    loader = Loader(make_tokens(33), batch_size=4, seq_len=4, repeat=False)
    assert iter(loader) is loader
    assert len(list(loader)) == 2
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(loader)
    assert loader.rows == 8
    assert len(list(loader)) == 2


def test_pass_that_ended_begins_again_without_the_rows_left_out():
    loader = Loader(make_tokens(17), batch_size=1, seq_len=4, repeat=False)
    assert len([*loader]) == 4
    loader.leave_out([(1, 3)])
    assert examples(take(loader, 9), 4) == [0, 3]


def test_broken_off_pass_goes_on():
    loader = Loader(make_tokens(33), batch_size=2, seq_len=4, repeat=False)
    for _ in loader:
        break
    assert examples(take(loader, 9), 4) == [2, 3, 4, 5, 6, 7]


def test_state_at_the_end_resumes_at_the_end():
    loader = Loader(make_tokens(33), batch_size=4, seq_len=4, repeat=False)
    list(loader)
    state = loader.get_state()
    loader.set_state(state)
    assert list(loader) == []


def test_one_pass_can_be_shuffled():
    loader = Loader(
        make_tokens(65), batch_size=8, seq_len=1, repeat=False, shuffle=True
    )
    seen = examples(take(loader, 9), 1)
    assert seen != list(range(64))
    assert sorted(seen) == list(range(64))


def test_file_order_can_repeat():
    loader = Loader(make_tokens(4), batch_size=2, seq_len=1, shuffle=False)
    assert examples(take(loader, 4), 1) == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize(("repeat", "limit", "length"), [(False, 1, 1), (True, 5, 5)])
def test_num_batches_ends_the_pass(repeat, limit, length):
    loader = Loader(
        make_tokens(33), batch_size=4, seq_len=4, repeat=repeat, num_batches=limit
    )
    assert len(loader) == length
    assert len(list(loader)) == length


def test_endless_loader_has_no_length():
    loader = Loader(make_tokens(33), batch_size=4, seq_len=4)
    with pytest.raises(TypeError, match=r"has no length; give repeat=False"):
        len(loader)


def test_position_can_be_far_along():
    loader = Loader(make_tokens(33), batch_size=4, seq_len=4)
    far = sys.maxsize // 2
    loader.set_state({**loader.get_state(), "rows": far})
    assert next(loader)["tokens"].shape == (4, 5)
    assert loader.rows == far + 4


@pytest.mark.parametrize("name", ["batch_size", "seq_len", "num_batches"])
def test_size_below_one_raises(name):
    sizes: dict[str, Any] = {"batch_size": 4, "seq_len": 4, name: 0}
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        Loader(make_tokens(33), **sizes)


def test_negative_seed_raises():
    with pytest.raises(ValueError, match="seed=-1 must not be negative"):
        Loader(make_tokens(33), batch_size=4, seq_len=4, seed=-1)


def test_batch_that_does_not_divide_raises():
    with pytest.raises(
        ValueError, match=r"batch_size=7 must be a multiple of .*=2.*take 6 or 8"
    ):
        Loader(
            make_tokens(33), batch_size=7, seq_len=4, process_index=0, process_count=2
        )


@pytest.mark.parametrize("index", [-1, 2])
def test_process_index_out_of_range_raises(index):
    with pytest.raises(ValueError, match=f"process_index={index} must be at least 0"):
        Loader(
            make_tokens(33),
            batch_size=4,
            seq_len=4,
            process_index=index,
            process_count=2,
        )


def test_too_short_corpus_raises():
    with pytest.raises(
        ValueError,
        match=r"has 16 tokens, 3 windows of seq_len=4, fewer than the 4 rows",
    ):
        Loader(make_tokens(16), batch_size=4, seq_len=4)
    assert Loader(make_tokens(17), batch_size=4, seq_len=4).batch_size == 4


def test_corpus_beyond_the_shuffle_raises():
    endless = np.broadcast_to(np.uint8(0), (2**33 + 1,))
    tokens = Tokens((endless,), files=("zeros",))
    with pytest.raises(
        ValueError, match=r"8,589,934,592 rows, but at most 4,294,967,296"
    ):
        Loader(tokens, batch_size=4, seq_len=1)
    assert len(Loader(tokens, batch_size=4, seq_len=2).source) == 2**32


def test_corpus_needs_a_length():
    with pytest.raises(ValueError, match="seq_len=None, but a corpus needs it"):
        Loader(make_tokens(33), batch_size=4)


def test_rows_have_their_length_already():
    windows = Windows(make_tokens(33), seq_len=4)
    loader = Loader(windows, batch_size=4, shuffle=False)
    assert examples(take(loader, 2), 4) == list(range(8))
    assert loader.padding == 0
    with pytest.raises(ValueError, match=r"seq_len=4 is for a corpus.*Windows"):
        Loader(windows, batch_size=4, seq_len=4)


def test_token_id_beyond_int32_raises():
    tokens = Tokens((np.array([0, 1, 2**31], np.uint32),), files=("ids",))
    loader = Loader(tokens, batch_size=2, seq_len=1, shuffle=False)
    with pytest.raises(
        ValueError, match="token 2 of the corpus has id 2147483648, but"
    ):
        next(loader)


def test_batch_that_failed_comes_again():
    class Flaky(Tokens):
        reads = 0

        def read(self, start, stop):
            Flaky.reads += 1
            if Flaky.reads == 6:
                raise OSError("the disk is gone")
            return super().read(start, stop)

    tokens = Flaky((np.arange(33),), files=("flaky",))
    loader = Loader(tokens, batch_size=2, seq_len=4, repeat=False)
    seen = []

    def run():
        for batch in loader:
            seen.append(examples(batch["tokens"], 4))

    with pytest.raises(OSError, match="the disk is gone"):
        run()
    assert loader.rows == 2 * len(seen) < 8
    run()
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]
