"""Can another process tell what a worker is at, at any moment?"""

import time
from pathlib import Path

import pytest

from jaxpar.launch.heartbeat import BeatFile, Heartbeat, read_heartbeat


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


def test_file_is_opened_once_for_many_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "heartbeat"
    file = BeatFile(path)
    assert file.read() is None
    heartbeat = Heartbeat(path)
    opened = []
    own = Path.open
    monkeypatch.setattr(Path, "open", lambda p, *a: opened.append(p) or own(p, *a))
    for step in range(5):
        heartbeat.enter("step", step)
        assert file.read().step == step
    assert opened == [path]
    file.close()
    file.close()
    assert file.read().step == 4
    file.close()
    assert opened == [path] * 2


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
