"""Which values come back from JSON as they were, and are the others refused?"""

import pytest

from jaxpar.checkpoint.json_values import as_json


def test_values_come_back_as_json_returns_them():
    value = {"a": [1, 2.5, None, True, "ü"], "b": {"c": ()}}
    assert as_json("meta", value) == {"a": [1, 2.5, None, True, "ü"], "b": {"c": []}}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"a": {1: "x"}}, "it has the key 1"),
        ([{"a": [{None: 1}]}], "it has the key None"),
        ({"a": object()}, "Object of type object is not JSON serializable"),
        ({"a": {1, 2}}, "Object of type set"),
    ],
)
def test_what_json_would_change_or_lose_is_refused(value, why):
    with pytest.raises(TypeError, match=f"data_state must be made of .*{why}"):
        as_json("data_state", value)


def test_circle_is_refused():
    circle: list = []
    circle.append({"again": circle})
    with pytest.raises((TypeError, RecursionError)):
        as_json("meta", circle)
