"""Which of a run's files may be damaged, and what becomes of them then?

A run goes on from its checkpoint alone. What else is in its folder is read leniently:
a damaged file is set aside, and what of it is sound is written anew.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpar.launch.lease import require_lease
from jaxpar.launch.own_files import read, read_json, set_aside, write_whole
from jaxpar.training import goodput, metrics, record
from jaxpar.training.run import EVENTS, Run


def mend(run: Run) -> list[str]:
    """Repair a run's files before they are used; called on process 0 only.

    Returns:
      The names of those that were damaged.
    """
    require_lease(run.folder)
    wholes = ((record.FILE, record.is_record), (goodput.FILE, goodput.is_account))
    logs = ((metrics.FILE, metrics.is_record), (EVENTS, _is_event))
    found = [n for n, is_sound in wholes if _mend_whole(run.folder / n, is_sound)]
    found += [n for n, is_sound in logs if _mend_log(run.folder / n, is_sound)]
    if read(run.folder / record.FILE) is None:
        record.write(run.folder, record.read(run.folder) or run.record)
    return found


def _mend_whole(path: Path, is_sound: Callable[[Any], bool]) -> bool:
    """Set a file aside unless its value is sound; whether it was damaged."""
    if read(path) is None or is_sound(read_json(path)):
        return False
    _say(path, set_aside(path))
    return True


def _mend_log(path: Path, is_sound: Callable[[Any], bool]) -> bool:
    """Keep the sound lines of a log; whether there were others."""
    lines = (read(path) or b"").splitlines(keepends=True)
    sound = [line for line in lines if is_sound(_value(line))]
    if sound == lines:
        return False
    # A kill may leave a part of the last line, which is not said.
    is_damaged = len(lines) > len(sound) + 1 or lines[-1].endswith(b"\n")
    if is_damaged:
        _say(path, set_aside(path))
    if is_damaged or path.name == EVENTS:  # Metrics report their own last line.
        write_whole(path, b"".join(sound), durable=True)
    return is_damaged


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_event(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("event"), str)


def _say(path: Path, new: Path) -> None:
    print(f"{str(path)!r} was damaged: it is now {new.name!r}, and the run goes on")
