import pytest

from jaxpar.data.rows import ordered


def stream(num_rows: int, count: int, **given: bool) -> list[int]:
    order = ordered(num_rows, seed=3, **given)
    return [order[index] for index in range(count)]


def test_numbers_repeat_in_their_order():
    assert stream(3, 7, shuffle=False, repeat=True) == [0, 1, 2, 0, 1, 2, 0]


def test_each_epoch_has_every_number_in_another_order():
    seen = stream(50, 150, shuffle=True, repeat=True)
    epochs = [seen[first : first + 50] for first in (0, 50, 100)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(50))


def test_one_epoch_ends():
    order = ordered(3, seed=0, shuffle=True, repeat=False)
    assert len(order) == 3


def test_more_numbers_than_can_be_shuffled_raise():
    with pytest.raises(ValueError, match="4,294,967,297 rows, but at most"):
        ordered(2**32 + 1, seed=0, shuffle=True, repeat=True)
