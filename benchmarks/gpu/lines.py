"""What has been measured: a file of JSON lines, each written as soon as it is known.

A case is settled on one code and one kind of device. ``code`` is a digest of the
sources, so that a commit of results alone settles nothing anew, and a machine without
git knows the same code.
"""

import collections
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FILE = "results.jsonl"
RESULT, DONE, FAILED, CUT = "result", "done", "failed", "cut"
SKIPPED, TOO_LARGE, NOT_BUILT = "skipped", "does not fit", "not built"
SETTLED = {DONE, SKIPPED, TOO_LARGE, NOT_BUILT}
ATTEMPTS = 2
"""A case that has failed as often is not tried again."""


@dataclasses.dataclass(frozen=True)
class Key:
    """What is not measured twice.

    Attributes:
      item: its name.
      case: its name within the item.
      code: the digest of the sources.
      device: as the driver names it.
    """

    item: str
    case: str
    code: str
    device: str


@dataclasses.dataclass(frozen=True)
class State:
    """Where a case stands.

    Attributes:
      settled: how it ended; "failed" after `ATTEMPTS` failures; "" if it is to be run.
      failures: how often it has failed.
    """

    settled: str = ""
    failures: int = 0


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line, and return when it is on the disk.

    A line that a killed process left unfinished is ended first, so that it damages no
    other.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        text = json.dumps(line).encode() + b"\n"
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = b"\n" + text
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """Read a file's lines; none without a file. Unfinished ones are left out."""
    if not path.is_file():
        return []
    found = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and "event" in line:
            found.append(line)
    return found


def key_of(line: Mapping[str, Any]) -> Key:
    """Whose line it is."""
    return Key(*(str(line.get(field.name)) for field in dataclasses.fields(Key)))


def states(lines: Iterable[Mapping[str, Any]]) -> dict[Key, State]:
    """Where each case stands that has lines."""
    found: dict[Key, State] = collections.defaultdict(State)
    for line in lines:
        key, event = key_of(line), line["event"]
        before = found[key]
        if event in SETTLED:
            found[key] = State(event, before.failures)
        elif event == FAILED:
            failures = before.failures + 1
            settled = FAILED if failures >= ATTEMPTS else before.settled
            found[key] = State(settled, failures)
    return dict(found)
