"""Does the report say how every worker ended, and the terminal what matters?"""

import json
import time
from pathlib import Path

import pytest

from jaxpar.launch.rendezvous import Attempt, Outcome, WorkerEnd
from jaxpar.launch.report import Report

ATTEMPT = Attempt(3, "run", None, {0: "a"}, {0: 2}, planned=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "launch").mkdir()
    return tmp_path


def end(index: int, code: int | None, **fields) -> WorkerEnd:
    given = {"at": "step 7", "resumed": 4, "step": 7, "error": None}
    given |= {"tail": [f"log of {index}"], "stacks": []} | fields
    return WorkerEnd(index=index, code=code, **given)


def test_attempt_has_every_worker_with_log_and_stacks(folder, capsys):
    report = Report(folder, host=0)
    workers = [end(0, 1, error="ValueError: no"), end(1, None, stacks=["File x"])]
    report.attempt(ATTEMPT, {0: Outcome("failed", 1, "worker 0 failed", workers)})
    text = report.path.read_text()
    assert text.startswith("attempt 3 on ")
    for line in (
        "host 0: failed: worker 0 failed",
        "  worker 0: code 1, at step 7",
        "    | log of 0",
        "  worker 1: ended by the supervisor, at step 7",
        "    : File x",
    ):
        assert line in text.splitlines()
    assert capsys.readouterr().err == "launch: ValueError: no\n"


def test_outcome_that_already_names_the_error_does_not_repeat_it(folder, capsys):
    outcome = Outcome(
        "failed", 1, "ValueError: no", [end(0, 1, error="ValueError: no")]
    )
    Report(folder, host=0).attempt(ATTEMPT, {0: outcome})
    assert capsys.readouterr().err == ""


def test_logs_of_workers_that_ended_well_are_left_out(folder):
    report = Report(folder, host=0)
    report.attempt(ATTEMPT, {0: Outcome("done", 0, "", [end(0, 0)])})
    assert "log of 0" not in report.path.read_text()


def test_slow_workers_of_this_attempt_are_listed(folder):
    report = Report(folder, host=0)
    now = time.time()
    events = [
        {"event": "slow", "step": 4, "why": "before", "time": now - 100},
        {"event": "slow", "step": 5, "why": "worker 1 takes twice", "time": now + 1},
        {"event": "bad", "step": 6, "why": "another event", "time": now + 1},
    ]
    lines = "\n".join(json.dumps(each) for each in events)
    (folder / "events.jsonl").write_text(lines + '\n{"event": "sl')
    report.attempt(ATTEMPT, {})
    assert "at step 5: worker 1 takes twice" in report.path.read_text()
    assert "before" not in report.path.read_text()
    assert "another event" not in report.path.read_text()


def test_end_is_said_only_where_it_is_a_failure(folder, capsys):
    report = Report(folder, host=0)
    report.over(0, "all is well")
    assert capsys.readouterr().out == ""
    report.over(70, "no restarts left")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "launch: no restarts left"
    assert "ended with code 70; more in " in said[1]


def test_new_lines_of_a_log_are_copied_until_the_end(folder, capsys):
    log = folder / "log"
    log.write_text("first\n")
    with Report(folder, host=0).following(log), log.open("a") as file:
        file.write("last, without its newline")
    assert capsys.readouterr().out == "first\nlast, without its newline"


def test_other_hosts_say_nothing(folder, capsys):
    report = Report(folder, host=1)
    with report.following(folder / "absent"):
        report.over(1, "failed")
        report.attempt(ATTEMPT, {0: Outcome("failed", 1, "x", [end(0, 1, error="e")])})
    assert not report.path.exists()
    assert capsys.readouterr() == ("", "")


def test_warning_about_a_host_is_on_its_terminal_and_the_leaders_in_the_report(
    folder, capsys
):
    for host in range(2):
        Report(folder, host).warn(f"of host {host}")
    assert Report(folder, 0).path.read_text() == "of host 0\n"
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("launch: of host 0\n", "launch: of host 1\n")
