"""Is a supervisor the only one of its host?"""

from pathlib import Path

import pytest

from jaxpar.launch.board import Board
from jaxpar.launch.supervisor import only_one


def test_second_launcher_of_a_host_is_refused(tmp_path: Path) -> None:
    """The head's place is the run's lease (test_lease.py)."""
    folder = tmp_path / "run" / "launch"
    first, second = (Board(folder, host, 2, "127.0.0.1") for host in (1, 2))
    with only_one(first), only_one(second):
        again = Board(first.folder, 1, 1, "127.0.0.1")
        refusal = pytest.raises(BlockingIOError, match=r"another launcher .* as host 1")
        with refusal, only_one(again):
            pytest.fail("taken")
    with only_one(again):
        assert (first.folder / "host-0001.lock").exists()
