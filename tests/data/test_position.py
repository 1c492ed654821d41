import pytest

from jaxpar.data.position import row_to_go_on_at

STREAM = {"seed": 0, "batch_size": 4}


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("position", [{"rows": 12}, {"position": 3}])
def test_rows_and_batches_are_the_same_position(position, change):
    assert row_to_go_on_at({**position, **STREAM}, STREAM, change=change) == 12


@pytest.mark.parametrize(
    ("stream", "row"),
    [
        ({"seed": 0, "batch_size": 6}, 12),
        ({"seed": 1, "batch_size": 4}, 0),
        ({"seed": 1, "batch_size": 6}, 0),
        ({"batch_size": 4}, 0),
        ({**STREAM, "sources": []}, 0),
    ],
)
def test_change_goes_on_only_in_the_same_stream(stream, row):
    for position in ({"rows": 12}, {"position": 3}):
        state = {**position, **STREAM}
        assert row_to_go_on_at(state, stream, change=True) == row
        with pytest.raises(ValueError, match=r"state (is of another|lacks)"):
            row_to_go_on_at(state, stream, change=False)


def test_entry_that_only_the_state_has_is_named():
    with pytest.raises(ValueError, match="another stream of batches: size was 8"):
        row_to_go_on_at({"rows": 0, "size": 8, **STREAM}, STREAM, change=False)


def test_state_without_a_position_starts_the_stream():
    assert row_to_go_on_at(STREAM, STREAM, change=True) == 0
    with pytest.raises(ValueError, match="state lacks rows; give what get_state"):
        row_to_go_on_at(STREAM, STREAM, change=False)
