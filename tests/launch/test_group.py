"""Are a host's workers started with their environment, signalled and ended?"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxpar.launch import group as module
from jaxpar.launch.group import Group, tail, worker_command
from jaxpar.launch.heartbeat import Heartbeat
from jaxpar.launch.rendezvous import Attempt
from jaxpar.launch.start import Launch, workers_of
from jaxpar.launch.worker_environment import Worker, current, say_error

DUMPS = """\
worker=$(echo "$JAXPAR_WORKER" | sed 's/.*"index": \\([0-9]*\\).*/\\1/')
stacks=FILES/worker-000$worker.stacks.txt
trap 'printf "stacks\\n_run_module_as_main\\n" > $stacks' USR2
echo ready
while :; do sleep 0.02; done
"""


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Group]]:
    """Start two workers that run a shell script, not Python."""
    groups = []

    def started(script: str) -> Group:
        monkeypatch.setattr(
            module, "worker_command", lambda command: ["sh", "-c", *command]
        )
        groups.append(Group(workers_in(tmp_path), [script]))
        return groups[0]

    yield started
    for group in groups:
        group.end()


def workers_in(folder: Path) -> list[Worker]:
    attempt = Attempt(1, "run", None, {0: "a"}, {0: 2}, 2)
    return workers_of(Launch(("x.py",), folder, processes=2), attempt)


def wait_for(done: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)


def all_ended(group: Group) -> bool:
    return None not in group.codes()


def test_worker_is_this_pythons_with_its_environment(start, monkeypatch) -> None:
    assert worker_command(["x.py", "--a"]) == [
        sys.executable, "-m", "jaxpar.launch.worker", "x.py", "--a",
    ]  # fmt: skip
    monkeypatch.setenv("OF_THE_SUPERVISOR", "kept")
    group = start('echo "$JAXPAR_WORKER"; echo $OF_THE_SUPERVISOR $PYTHONUNBUFFERED')
    wait_for(lambda: all_ended(group))
    for worker in group.workers:
        contract, rest = worker.log.read_text().splitlines()
        assert current({"JAXPAR_WORKER": contract}) == worker
        assert rest == "kept 1"
    assert Path(group.workers[0].files).stat().st_mode & 0o777 == 0o700


def test_ends_tell_codes_tails_and_errors(start) -> None:
    group = start("echo out; echo err >&2; exit 3")
    wait_for(lambda: all_ended(group))
    say_error(group.workers[1], "ValueError: no")
    Heartbeat(group.workers[1].heartbeat).enter("step", 5)
    first, second = group.ends()
    assert (first.index, first.code, first.at) == (0, 3, "start")
    assert (first.tail, first.error, first.stacks) == (["out", "err"], None, [])
    assert (second.at, second.step, second.error) == (
        "step, step 5",
        5,
        "ValueError: no",
    )


def test_workers_are_ended_with_their_children(start, tmp_path) -> None:
    """A worker's own process and those that it started; its code is not its own."""
    group = start(f"sleep 100 & echo $! > {tmp_path}/$$; wait")
    wait_for(lambda: len(list(tmp_path.glob("[0-9]*"))) == 2)
    children = [int(path.read_text() or 0) for path in tmp_path.glob("[0-9]*")]
    group.end()
    assert group.codes() == [-signal.SIGKILL] * 2
    assert [end.code for end in group.ends()] == [None, None]
    wait_for(lambda: not any(map(is_running, children)))
    group.end()


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status != "Z"


def test_signals_reach_running_workers(start) -> None:
    group = start("trap 'exit 7' TERM; echo ready; while :; do sleep 0.02; done")
    wait_for(lambda: all(worker.log.read_text() for worker in group.workers))
    assert group.codes() == [None, None]
    group.send(signal.SIGTERM)
    wait_for(lambda: all_ended(group))
    group.send(signal.SIGTERM)
    assert group.codes() == [7, 7]


def test_stopped_worker_is_found_and_dumps_its_stacks(start, tmp_path) -> None:
    files = workers_in(tmp_path)[0].files
    group = start(DUMPS.replace("FILES", files))
    wait_for(lambda: all(worker.log.read_text() for worker in group.workers))
    assert group.stopped() == set()
    os.kill(group._processes[1].pid, signal.SIGSTOP)
    wait_for(lambda: group.stopped() == {1})
    group.dump_stacks()
    assert group.stopped() == set()
    group.end()
    assert [end.stacks[0] for end in group.ends()] == ["stacks", "stacks"]


def test_group_that_can_not_be_started_whole_leaves_nobody(
    tmp_path, monkeypatch
) -> None:
    real, started = subprocess.Popen, []

    def popen(*args, **options):
        if started:
            raise OSError("no more processes")
        started.append(real(["sleep", "100"], start_new_session=True))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(OSError, match="no more processes"):
        Group(workers_in(tmp_path), ["x.py"])
    assert started[0].returncode == -signal.SIGKILL


def test_tail_is_the_last_lines_of_a_long_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == []
    lines = [f"line {number} \N{GREEK SMALL LETTER ALPHA}" for number in range(5000)]
    log.write_text("\n".join(lines))
    assert tail(log) == lines[-20:]
    log.write_bytes(b"\xff\n")
    assert tail(log) == ["\N{REPLACEMENT CHARACTER}"]
