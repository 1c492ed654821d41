"""Is a failed save tried again until it is on the disk, or the run ends?"""

import pytest

from jaxpar.launch import own_files
from jaxpar.training.saves import Saves


class Disk:
    """Saves that fail: as they begin, or as they are waited for."""

    def __init__(self, begins: int = 0, waits: int = 0):
        self.left = {"begin": begins, "wait": waits}
        self.calls: list[str] = []
        self.failed: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.left[name]:
            self.left[name] -= 1
            raise OSError(f"{name} {self.left[name]}")

    def saves(self, *, stops: bool = True) -> Saves:
        def stop(why: str) -> None:
            raise SystemExit(why)

        return Saves(
            *(lambda: self._call("begin"), lambda: self._call("wait")),
            *(self.failed.append, stop if stops else None),
        )


def test_save_that_succeeds_is_left_in_the_background():
    disk = Disk()
    disk.saves().start()
    assert disk.calls == ["wait", "begin"]


def test_one_that_failed_is_followed_by_one_that_is_waited_for():
    disk = Disk(waits=1)
    disk.saves().start()
    assert disk.calls == ["wait", "begin", "wait"]
    assert disk.failed == ["wait 0"]


@pytest.mark.parametrize("kind", ["begins", "waits"])
def test_save_is_tried_until_it_succeeds(kind):
    disk = Disk(**{kind: 3})
    disk.saves().wait() if kind == "waits" else disk.saves().start()
    assert disk.calls[-2:] == ["begin", "wait"]
    assert len(disk.failed) == 3


def test_run_ends_once_the_time_is_over():
    disk = Disk(begins=10**9)
    with pytest.raises(SystemExit, match="begin"):
        disk.saves().start()
    assert len(disk.failed) == 1 + len(list(own_files.pauses()))


def test_run_goes_on_if_asked():
    disk = Disk(waits=1, begins=1)
    disk.saves(stops=False).start()
    assert disk.calls == ["wait", "begin"]
    assert not Disk(waits=1).saves().have_ended()
