"""Do processes hear what process 0 found on disk, and its errors?"""

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from jaxpar.checkpoint import Restored, processes


def test_each_process_goes_on_from_its_own_data_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    restored = Restored(3, None, {}, [{"at": 1}, {"at": 2}], {})
    assert restored.data_state == {"at": 2}


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make this process the second of two; the list is what the first sends."""
    sent: list[Any] = []

    def allgather(mine: Any) -> np.ndarray:
        return np.stack([sent.pop(0), mine])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(multihost_utils, "process_allgather", allgather)
    return sent


def test_gather_keeps_values_of_differing_lengths(second_of_two: list[Any]) -> None:
    text = b'{"long": [1, 2, 3, "\\u00fc"]}'
    padded = np.frombuffer(text.ljust(32, b"\0"), np.uint8)
    second_of_two += [np.int32(len(text)), padded]
    assert processes.gather(7) == [{"long": [1, 2, 3, "ü"]}, 7]


@pytest.mark.parametrize(
    ("name", "error"),
    [("FileNotFoundError", FileNotFoundError), ("JSONDecodeError", ValueError)],
)
def test_an_error_of_the_first_process_raises_everywhere(
    name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    answer = {"error": name, "text": "no step 3"}
    monkeypatch.setattr(processes, "gather", lambda _: [answer, {}])
    with pytest.raises(error, match="no step 3"):
        processes.from_first(lambda: pytest.fail("asked on process 1"))


def test_the_first_process_tells_its_error_before_raising(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find() -> None:
        raise NotADirectoryError("a file")

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "gather", lambda mine: [mine, {}])
    with pytest.raises(NotADirectoryError, match="a file"):
        processes.from_first(find)
