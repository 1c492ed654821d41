"""Can another process tell what a worker is at, at any moment?"""

import time
from pathlib import Path

from jaxpar.launch.heartbeat import PHASES, Beat, Heartbeat, read_heartbeat
from jaxpar.launch.limits import Limits


def test_reader_sees_phase_step_and_since_when(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    heartbeat = Heartbeat(path)
    assert str(read_heartbeat(path)) == "start"
    heartbeat.resume(4)
    began = time.monotonic()
    heartbeat.enter("step", 5)
    beat = read_heartbeat(path)
    assert (beat.phase, beat.step, beat.resumed) == ("step", 5, 4)
    assert began <= beat.since <= time.monotonic()
    heartbeat.enter("save")
    assert str(read_heartbeat(path)) == "save, step 5"


def test_worker_that_has_not_said_anything_has_no_pulse(tmp_path: Path) -> None:
    assert read_heartbeat(tmp_path / "none") is None
    (tmp_path / "empty").write_bytes(b"")
    assert read_heartbeat(tmp_path / "empty") is None


def test_half_written_pulse_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    Heartbeat(path).enter("step", 3)
    content = bytearray(path.read_bytes())
    content[0] |= 1  # As while the fields are written.
    path.write_bytes(content)
    assert read_heartbeat(path) is None


def test_process_without_a_supervisor_writes_nowhere() -> None:
    Heartbeat(None).enter("step", 1)


def test_each_phase_has_its_limit_and_the_latest_is_named_first() -> None:
    limits = Limits(start=10.0, compile=20.0, step=5.0, save=30.0)
    assert [limits.of(phase) for phase in PHASES] == [10, 30, 20, 5, 5, 30, 20, 30]
    beats = [
        Beat("step", 7, 0, since=90.0),
        Beat("step", 6, 0, since=94.0),
        Beat("compile", 1, 0, since=90.0),
        Beat("step", 7, 0, since=99.0),
    ]
    late = limits.late(beats, now=100.0)
    assert [place for place, _ in late] == [1, 0]
    assert late[0][1] == "was at step, step 6 for 6.0 s, above the limit of 5 s"
    assert Limits(step=0.0, compile=0.0).late(beats, now=1e9) == []
