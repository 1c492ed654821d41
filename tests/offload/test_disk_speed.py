"""Is a disk measured as it is used, and left as it was?"""

import time
from pathlib import Path
from unittest import mock

import pytest

from jaxpar.offload import disk_speed
from jaxpar.offload.disk_speed import DiskSpeed, measure_disk

MB = 1 << 20


def test_rates_are_those_of_the_disk(tmp_path: Path) -> None:
    def moves(seconds: float):
        return lambda *args: time.sleep(seconds)

    with (
        mock.patch.object(disk_speed, "read", moves(0.01)),
        mock.patch.object(disk_speed, "write", moves(0.02)),
    ):
        found = measure_disk(tmp_path, 128 * MB, threads=2)
    assert found.read == pytest.approx(2 * 8 * MB / 0.01, rel=0.3)
    assert found.write == pytest.approx(2 * 8 * MB / 0.02, rel=0.3)
    assert found.both == pytest.approx(2 * 8 * MB / 0.015, rel=0.3)


def test_a_real_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = measure_disk(tmp_path, 16 * MB)
    assert min(found.read, found.write, found.both) > 1e6
    assert list(tmp_path.iterdir()) == []


def test_rates_are_said_in_gigabytes() -> None:
    said = str(DiskSpeed(1.5e9, 1e9, 2.25e9))
    assert said == "reads 1.50 GB/s, writes 1.00 GB/s, both 2.25 GB/s"
