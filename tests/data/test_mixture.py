import itertools
import json
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.data import Loader, Mixture, RowSource, Tokens, Windows


def make_rows(start: int, length: int, seq_len: int = 1, **given) -> Windows:
    ids = np.arange(start, start + length + 1, dtype=np.uint16)
    return Windows(Tokens((ids,), ("counting",), **given), seq_len=seq_len)


def make_mixture(
    weights: tuple[float | int, ...] = (0.7, 0.3), lengths=(20, 20)
) -> Mixture:
    rows = [make_rows(100 * i, length) for i, length in enumerate(lengths)]
    return Mixture(list(zip(rows, weights, strict=True)))


def take(loader: Loader, count: int) -> tuple[np.ndarray, np.ndarray]:
    batches = list(itertools.islice(loader, count))
    tokens = np.concatenate([batch["tokens"][:, 0] for batch in batches])
    return tokens, np.concatenate([batch["source"] for batch in batches])


@settings(max_examples=50)
@given(
    weights=st.lists(
        st.sampled_from([0.1, 0.3, 1 / 3, 0.7, 1.0, 2, 17.5]), min_size=1, max_size=5
    ),
    first=st.sampled_from([0, 10**6, 2**40]),
)
def test_shares_are_exact_at_every_row(weights, first):
    order = make_mixture(tuple(weights), (50,) * len(weights)).order(
        seed=0, shuffle=False, repeat=True
    )
    exact = [Fraction(repr(weight)) for weight in weights]
    taken = [Counter()]
    for row in range(first, first + 60):
        taken.append(taken[-1] + Counter([order[row] // 50]))
    for count, so_far in enumerate(taken):
        for source, weight in enumerate(exact):
            share = count * weight / sum(exact)
            # Its start is not at a whole number of rounds: one more row of slack.
            assert abs(so_far[source] - share) <= len(weights)


def test_weights_that_are_no_round_numbers_are_exact_over_long_runs():
    # 7 : 3 in hundredths of the smaller is 233 : 100, which is 3 rows off in 10,000.
    order = make_mixture().order(seed=0, shuffle=False, repeat=True)
    counted = Counter(order[row] // 20 for row in range(10_000))
    assert counted == {0: 7_000, 1: 3_000}


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_source_goes_through_its_epochs(shuffle):
    loader = Loader(
        make_mixture((3, 1), (8, 5)), batch_size=10, shuffle=shuffle, seed=1
    )
    tokens, source = take(loader, 8)
    for index, length in enumerate((8, 5)):
        seen = tokens[source == index] - 100 * index
        full = seen[: len(seen) // length * length].reshape(-1, length)
        assert len(full) >= 3
        np.testing.assert_array_equal(np.sort(full), [range(length)] * len(full))
        assert (full[0].tolist() != full[1].tolist()) == shuffle


def test_sources_of_one_length_have_orders_of_their_own():
    tokens, source = take(Loader(make_mixture((1, 1)), batch_size=40), 4)
    orders = [(tokens[source == i] - 100 * i).reshape(-1, 20).tolist() for i in (0, 1)]
    epochs = [tuple(epoch) for order in orders for epoch in order]
    assert len(set(epochs)) == len(epochs)


def test_batch_has_rows_of_their_sources():
    loader = Loader(make_mixture(), batch_size=6, process_index=1, process_count=2)
    batch = next(loader)
    assert {name: x.shape for name, x in batch.items()} == {
        "tokens": (3, 2),
        "source": (3,),
    }
    assert (batch["tokens"][:, 0] // 100 == batch["source"]).all()
    assert {name: (x.shape, x.dtype) for name, x in loader.sample_batch.items()} == {
        "tokens": ((6, 2), np.int32),
        "source": ((6,), np.int32),
    }


def test_mixture_goes_on_at_its_row_with_other_batches_and_processes():
    expected, _ = take(Loader(make_mixture(), batch_size=4), 12)
    loader = Loader(make_mixture(), batch_size=4)
    take(loader, 3)
    state = json.loads(json.dumps(loader.get_state()))
    parts = []
    for index in range(2):
        again = Loader(
            make_mixture(), batch_size=8, process_index=index, process_count=2
        )
        again.leave_out([(20, 24)])
        again.set_state(state, change=True)
        parts.append(take(again, 4)[0].reshape(4, 4))
    rows = np.concatenate(parts, axis=1).ravel()
    kept = [row for row in range(12, 48) if not 20 <= row < 24][:32]
    np.testing.assert_array_equal(rows, expected[kept])


def test_state_of_other_weights_is_of_another_stream():
    state = Loader(make_mixture(), batch_size=4).get_state()
    loader = Loader(make_mixture((0.6, 0.4)), batch_size=4)
    with pytest.raises(ValueError, match=r"another stream .*sources was .*0\.7"):
        loader.set_state(state)
    loader.set_state({**state, "rows": 8}, change=True)
    assert loader.rows == 0


def test_weights_of_numpy_are_those_of_python():
    numpy, python = make_mixture(tuple(np.array([0.7, 0.3]))), make_mixture()
    assert json.dumps(numpy.identity()) == json.dumps(python.identity())
    orders = [
        mixture.order(seed=0, shuffle=False, repeat=True) for mixture in (numpy, python)
    ]
    assert [orders[0][row] for row in range(30)] == [
        orders[1][row] for row in range(30)
    ]


def test_missing_weights_are_1():
    mask = np.arange(21, dtype=np.uint8) % 2
    mixture = Mixture([(make_rows(0, 20), 1), (make_rows(100, 20, loss_mask=mask), 1)])
    assert isinstance(mixture, RowSource)
    batch = mixture.read([3, 23, 24])
    assert batch["weights"].tolist() == [[1], [0], [1]]
    assert batch["tokens"][:, 0].tolist() == [3, 103, 104]


def test_rows_of_different_shapes_raise():
    with pytest.raises(
        ValueError, match=r"sources\[1\] has rows of tokens int32\[3\], .* int32\[2\]"
    ):
        Mixture([(make_rows(0, 20), 1), (make_rows(0, 20, seq_len=2), 1)])


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_weight_that_is_not_positive_raises(weight):
    with pytest.raises(ValueError, match=rf"sources\[1\] has weight {weight}"):
        make_mixture((1, weight))


def test_mixture_in_a_mixture_raises():
    with pytest.raises(ValueError, match=r"sources\[0\] is a Mixture itself"):
        Mixture([(make_mixture(), 1)])


def test_mixture_of_nothing_raises():
    with pytest.raises(ValueError, match="sources: none given"):
        Mixture([])


def test_one_pass_of_a_mixture_raises():
    with pytest.raises(ValueError, match="repeat=False, but a Mixture has no end"):
        Loader(make_mixture(), batch_size=4, repeat=False)
    loader = Loader(make_mixture(), batch_size=4, num_batches=2, shuffle=False)
    assert len(list(loader)) == 2


def test_description_names_the_sources():
    loader = Loader(make_mixture(), batch_size=40)
    text = loader.source.description
    assert text == "; ".join(
        f"{weight} of 21 tokens, 20 windows of seq_len=1" for weight in (0.7, 0.3)
    )
    assert loader.padding == 0


def test_one_source_has_its_rows_once_under_the_mixtures_names():
    """Also "weights", which another source has; its place is the mixture's."""
    mask = np.arange(11, dtype=np.uint8) % 2
    rows = [make_rows(0, 5), make_rows(100, 10, loss_mask=mask)]
    mixture = Mixture([(rows[0], 3), (rows[1], 1)])
    for index, length in enumerate((5, 10)):
        alone = mixture.only(index)
        assert isinstance(alone, RowSource)
        assert alone.shapes == mixture.shapes
        assert len(alone) == length
        batches = list(Loader(alone, batch_size=5, repeat=False))
        found = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
        own = rows[index].read(range(length))
        np.testing.assert_array_equal(found["tokens"], own["tokens"])
        np.testing.assert_array_equal(
            found["weights"], own.get("weights", np.ones((length, 1)))
        )
        assert found["source"].tolist() == [index] * length
    assert [mixture.only(i).identity()["source"] for i in (0, 1)] == [0, 1]


def test_one_source_goes_through_epochs_and_batches_like_any_rows():
    loader = Loader(make_mixture((1, 1), (8, 5)).only(1), batch_size=4, seed=1)
    tokens, source = take(loader, 5)
    epochs = (tokens - 100).reshape(4, 5)
    np.testing.assert_array_equal(np.sort(epochs), [range(5)] * 4)
    assert set(source.tolist()) == {1}


@pytest.mark.parametrize("index", [-1, 2])
def test_source_that_is_not_there_is_refused(index):
    with pytest.raises(ValueError, match=f"index={index} must be .* from 0 to 1"):
        make_mixture().only(index)
