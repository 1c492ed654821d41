"""Does a file of the shared folder that was changed in any way do no harm to a reader?

Files as a run leaves them, mutated: bits, truncation, doubling, nesting, numbers,
types, bytes of no text. A reader gives its usual value or its documented error, takes
little memory and writes nothing. Checkpoints: tests/checkpoint/test_security.py. The
files that a resume reads leniently (goodput.json, run.json, events.jsonl):
tests/training/test_fuzz.py.
"""

import contextlib
import dataclasses
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpar.checkpoint import manifest
from jaxpar.checkpoint.leaves import LeafSpec
from jaxpar.launch.board import Board
from jaxpar.launch.heartbeat import Heartbeat, read_heartbeat
from jaxpar.launch.leader import (
    Leader,
    make_secret,
    read_left_out,
    read_secret,
    write_left_out,
)
from jaxpar.launch.lease import Holder, read_holder
from jaxpar.launch.rendezvous import Attempt, Outcome, WorkerEnd
from jaxpar.launch.worker_environment import read_error, say_error
from tests.launch.test_worker_environment import WORKER

MEMORY = 100_000_000
EVIL = [-1, 2**63, 10**400, 1.5, float("nan"), "1", None, True, [], {"a": 1}, "\ud800"]
NOT_JSON = [b"[" * 200_000, b'{"a":' * 100_000, b"9" * 100_000, b"\xff\xfe", b"", b"{}"]
NOT_JSON += [b"null", b"[]", b'"x"', b"1" * 5000, b"1e999", b"NaN"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A file, what reads it, and what it may raise."""

    write: Callable[[Path], Path]
    read: Callable[[Path], Any]
    errors: tuple[type[Exception], ...] = ()


def board(folder: Path) -> Board:
    return Board(folder, 0, 2, "127.0.0.1")


def write_member(folder: Path) -> Path:
    end = WorkerEnd(0, -9, "step, step 3", 1, 3, "error", ["a"], ["b"])
    board(folder).publish(attempt=1, outcome=Outcome("failed", 1, "why", [end]))
    return folder / "host-0000.json"


def write_attempt(folder: Path) -> Path:
    attempt = Attempt(3, "run", "127.0.0.1:1", {0: "a", 1: "b"}, {0: 2, 1: 2}, 4)
    board(folder).announce(attempt)
    return folder / "attempt.json"


def write_plan(folder: Path) -> Path:
    board(folder).planned(4)
    return folder / "plan.json"


def write_leader(folder: Path) -> Path:
    found = Leader(3, 1, "a", "127.0.0.1", 99)
    (folder / "leader.json").write_text(json.dumps(dataclasses.asdict(found)))
    return folder / "leader.json"


def follow_leader(path: Path) -> None:
    """As a supervisor does that looks for one, at whatever address that may be."""
    made = Board(path.parent, 0, 2, "127.0.0.1", hosts=2, lost=0.0)
    make_secret(path.parent)
    made.publish()
    made.publish()
    made.close()
    (path.parent / "secret").unlink()
    (path.parent / "host-0000.json").unlink()


def write_secret(folder: Path) -> Path:
    make_secret(folder)
    return folder / "secret"


def write_left(folder: Path) -> Path:
    write_left_out(folder, {3, 4})
    return folder / "left_out.json"


def write_lease(folder: Path) -> Path:
    path = folder / "lease.1"
    holder = Holder("host", "place", 12, 34, "2026-01-01", "user", 5)
    path.write_text(json.dumps(dataclasses.asdict(holder)))
    return path


def write_heartbeat(folder: Path) -> Path:
    Heartbeat(folder / "beat").enter("step", 3)
    return folder / "beat"


def write_error(folder: Path) -> Path:
    worker = dataclasses.replace(WORKER, files=str(folder))
    say_error(worker, "ValueError: x")
    return worker.error


def write_manifest(folder: Path) -> Path:
    (folder / "data").write_bytes(bytes(64))
    leaves = {"a": LeafSpec((4, 4), "float32")}
    own = manifest.Manifest(1, "run", leaves, [{"at": 3}], {"x": 1}, 0.5, {"jax": "1"})
    manifest.seal(folder, own)
    return folder / manifest.MANIFEST


def read_manifest(path: Path) -> None:
    # As who means harm writes it: with the right checksum.
    digest = manifest.digest(path.read_bytes())
    (path.parent / manifest.DIGEST).write_text(digest)
    found = manifest.read_manifest(path.parent)
    manifest.damages(path.parent, found)


def read_plan(path: Path) -> None:
    assert isinstance(board(path.parent).planned(4), int)


CASES = {
    "member": Case(write_member, lambda path: board(path.parent).member(0)),
    "attempt": Case(write_attempt, lambda path: board(path.parent).attempt()),
    "plan": Case(write_plan, read_plan),
    "leader": Case(write_leader, follow_leader),
    "secret": Case(write_secret, lambda path: read_secret(path.parent)),
    "left out": Case(write_left, lambda path: read_left_out(path.parent)),
    "lease": Case(write_lease, lambda path: str(read_holder(path.parent, 1))),
    "dead": Case(
        write_lease,
        lambda path: (found := read_holder(path.parent, 1)) and found.is_dead(),
    ),
    "heartbeat": Case(write_heartbeat, lambda path: str(read_heartbeat(path))),
    "error": Case(
        write_error,
        lambda path: read_error(dataclasses.replace(WORKER, files=str(path.parent))),
    ),
    "manifest": Case(write_manifest, read_manifest, (ValueError,)),
}


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Other bytes of a file."""
    own = bytearray(content)
    kind = rng.randrange(7)
    if kind == 0:
        for _ in range(rng.randint(1, 8)):
            own[rng.randrange(len(own))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del own[rng.randrange(len(own)) :]
    elif kind == 2:
        at = rng.randrange(len(own))
        own[at:at] = own[: rng.randrange(len(own) + 1)]
    elif kind == 3:
        at = rng.randrange(len(own))
        own[at:at] = rng.randbytes(rng.randint(1, 64))
    elif kind == 4:
        return rng.choice(NOT_JSON)
    else:
        return changed_value(content, rng)
    return bytes(own)


def changed_value(content: bytes, rng: random.Random) -> bytes:
    """JSON with one value of another type or size, one missing or one more."""
    try:
        whole = json.loads(content)
    except ValueError:
        return content * rng.randint(2, 50)
    places = list(places_in(whole))
    if not places:
        return json.dumps(rng.choice(EVIL)).encode()
    container, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[rng.choice(["x", "../evil", "", "__class__"])] = container[key]
    else:
        container[key] = rng.choice(EVIL)
    return json.dumps(whole).encode()


def places_in(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, each in items:
        yield value, key
        yield from places_in(each)


def attack(case: Case, folder: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    path = case.write(folder)
    pristine = path.read_bytes()
    case.read(path)
    names = sorted(folder.rglob("*"))
    tracemalloc.start()
    try:
        for number in range(count):
            content = mutated(pristine, rng)
            path.write_bytes(content)
            try:
                with contextlib.suppress(*case.errors):
                    case.read(path)
            except Exception as error:
                error.add_note(f"mutation {number}: {content[:400]!r}")
                raise
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    assert sorted(folder.rglob("*")) == names, "nothing was written elsewhere"


@pytest.mark.parametrize("name", CASES)
def test_mutated_file_does_no_harm(name, tmp_path):
    attack(CASES[name], tmp_path, seed=29, count=60)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_ten_thousand_mutations_do_no_harm(name, tmp_path):
    attack(CASES[name], tmp_path, seed=7, count=10_000 // len(CASES) + 1)


def test_memory_and_errors_are_noticed(tmp_path):
    """The attack itself, against a reader that is wrong."""
    case = CASES["member"]
    wrong = dataclasses.replace(case, read=lambda path: json.loads(path.read_bytes()))
    with pytest.raises((ValueError, RecursionError)):
        attack(wrong, tmp_path, seed=29, count=60)
