"""Are wrong options refused by name?"""

import pytest

from jaxpar import Offload


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"optimizer": "hots"},
            "offload: optimizer='hots' must be 'host', 'disk' or None",
        ),
        ({"fraction": 1.5}, "offload: fraction=1.5 must be from 0 to 1"),
        ({"fraction": -0.1}, "offload: fraction=-0.1 must be from 0 to 1"),
        ({"piece_mb": 0.0}, "offload: piece_mb=0.0 must be positive"),
        (
            {"update": "hots"},
            "update='hots' must be 'device', 'host' or 'auto'",
        ),
        (
            {"optimizer": None, "update": "host"},
            "offload: update='host' needs optimizer='host'",
        ),
        ({"params": "hots"}, "offload: params='hots' must be 'host', 'disk' or None"),
        ({"params": "disk"}, "offload: params='disk' needs optimizer='disk'"),
        ({"params": "host"}, "params='host' needs optimizer='host' and update='host'"),
        (
            {"params": "host", "update": "host", "delayed": True},
            "offload: params='host' can't be delayed",
        ),
    ],
)
def test_what_is_out_of_range_is_refused(given: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Offload(**given)
