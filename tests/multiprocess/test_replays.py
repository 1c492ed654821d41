"""Are steps of several processes replayed on one another's devices?

Shards go from a process to another one, to the bit, also if each has one device.
"""

from pathlib import Path

import pytest

from tests.multiprocess.replay_worker import LEAF
from tests.multiprocess.test_training import launch
from tests.multiprocess.worker import Case

pytestmark = [pytest.mark.multiprocess, pytest.mark.thorough]
WORKER = "tests.multiprocess.replay_worker"


def test_device_of_any_process_is_named_by_all(tmp_path: Path) -> None:
    cases = [
        Case(data=4, tensor=1, zero=3),
        Case(data=2, tensor=2, zero=2, accumulate=2),
    ]
    both = launch(cases, tmp_path, WORKER)
    assert both[0] == both[1]
    for seen in both[0]:
        assert seen["losses"] == seen["without"]
        assert seen["owners"] == [0, 0, 1, 1]
        for said, own, process in zip(
            seen["said"], seen["devices"], seen["owners"], strict=True
        ):
            right = f"By the vote of 3 runs device {own} (cpu, process {process}) is"
            assert right in said
            assert LEAF in said


def test_processes_of_one_device_compare_with_each_other(tmp_path: Path) -> None:
    both = launch([Case(data=2, tensor=1, zero=3)], tmp_path, WORKER, devices=1)
    assert both[0] == both[1]
    ((seen,), _) = both
    assert seen["losses"] == seen["without"]
    for said, first, other in zip(
        seen["said"], seen["devices"], seen["devices"][::-1], strict=True
    ):
        assert "two devices have no third one to decide" in said
        assert f"by device {first} (" in said
        assert f"and device {other} (" in said
