"""Is a dataclass read from JSON as it was written, and nothing else?"""

import dataclasses
import json

import pytest

from jaxpar.launch.rendezvous import Attempt, Member, Outcome, WorkerEnd
from jaxpar.launch.typed_json import as_kind, read_record

END = WorkerEnd(0, -9, "step", None, 3, "error", ["a"], [])
MEMBER = Member(0, "a", 1, "h", "::1", 2, 1, True, Outcome("failed", 1, "why", [END]))
ATTEMPT = Attempt(3, "run", None, {0: "a", 11: "b"}, {0: 2, 11: 1}, 3, tls="/x")


@pytest.mark.parametrize("written", [MEMBER, ATTEMPT, END])
def test_what_was_written_is_read(written, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(dataclasses.asdict(written)))
    assert read_record(type(written), path) == written
    assert read_record(type(written), tmp_path / "missing") is None


@pytest.mark.parametrize(
    "change",
    [
        {"count": True},
        {"count": "1"},
        {"count": 2**63},
        {"id": None},
        {"id": "\ud800"},
        {"more": 1},
        {"outcome": []},
        {"outcome": {"kind": "failed"}},
        {"outcome": dataclasses.asdict(Outcome("failed", 1, "", [])) | {"kind": "x"}},
    ],
)
def test_what_was_not_is_refused(change, tmp_path):
    content = dataclasses.asdict(MEMBER) | change
    with pytest.raises((ValueError, TypeError)):
        as_kind(Member, content)
    (tmp_path / "file.json").write_text(json.dumps(content))
    assert read_record(Member, tmp_path / "file.json") is None
