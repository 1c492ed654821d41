"""Do launched workers train as one process does, and stay at it through trouble?

Real supervisors and workers, gloo between them.
"""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from jaxpar.launch.exit_codes import REFUSED, STOPPED
from jaxpar.training.goodput import read_account, total
from jaxpar.training.metrics import read_metrics
from tests.multiprocess.launching import (
    Launched,
    command,
    final_files,
    run_to_the_end,
)
from tests.runs import events, losses

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

MESHES = {
    "data": ("--mesh.data=4",),
    "tensor": ("--mesh.data=1", "--mesh.tensor=4"),
    "pipe": ("--mesh.data=2", "--mesh.pipe=2", "--accumulate=4", "--zero=1"),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_two_and_four_workers_train_as_one(mesh: str, tmp_path: Path) -> None:
    """The same mesh of four devices, in one process, in two and in four."""
    flags = (*MESHES[mesh], "--dropout=0", "--steps=6", "--save-every=6")
    found = {}
    for processes in (1, 2, 4):
        out = tmp_path / str(processes)
        run_to_the_end(out, *flags, processes=processes)
        found[processes] = losses(out)
    for processes in (2, 4):
        assert found[processes] == pytest.approx(found[1], rel=1e-6), mesh
    assert len(found[1]) == 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers that nothing happened to."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    run_to_the_end(out, processes=2)
    return out


def assert_same_end(out: Path, whole: Path, step: int = 12) -> None:
    assert losses(out) == losses(whole)
    mine, theirs = final_files(out, step), final_files(whole, step)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if mine[name] != theirs[name]] == []


def test_killed_worker_is_back_in_a_minute(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    # Slowly, so that it is killed before step 8 is saved.
    args = command(out, "--pause=0.5", of_launch=("--processes=2",))
    with Launched(out, args) as run:
        run.wait_for_save(4)
        run.kill_a_worker(1)
        began = time.monotonic()
        run.until(lambda: run.attempt() == 2, "a second attempt")
        run.wait_for_step(5)
        assert time.monotonic() - began < 60
        assert run.code() == 0, run.output()
        report = run.report()
    assert "worker 1" in report
    assert "was killed by SIGKILL" in report
    assert_same_end(out, whole)
    accounts = read_account(out)
    assert [account["resumed"] for account in accounts] == [0, 4]
    wall = accounts[-1]["ended"] - accounts[0]["began"]
    assert sum(total(accounts).values()) == pytest.approx(wall, abs=0.1)
    assert "2 starts" in run.output()


def test_stopped_worker_is_found_within_the_limit(whole: Path, tmp_path: Path) -> None:
    """SIGSTOP: nothing ends, and nothing goes on."""
    out, limit = tmp_path / "stopped", 10.0
    args = command(out, of_launch=("--processes=2", f"--limits.step={limit}"))
    with Launched(out, args) as run:
        run.wait_for_step(6)
        os.kill(run.workers()[1].pid, signal.SIGSTOP)
        began = time.monotonic()
        run.until(lambda: "restarting" in run.output(), "a restart")
        seconds = time.monotonic() - began
        assert run.code() == 0, run.output()
        report = run.report()
    assert limit <= seconds < 1.1 * limit + 3, "3 s to write stacks and end the group"
    # Worker 0, which waits for it, may be beyond the limit milliseconds before it.
    first_late = r"was stopped by a signal: worker 0 .*above the limit of 10 s"
    both_late = r"was at .*above the limit of 10 s \(the process was stopped"
    assert re.search(rf"worker 1 \(\S+\) ({first_late}|{both_late})", report), report
    late = re.search(r"was at \w+, step \d+ for (\d+\.\d) s", report)
    assert limit <= float(late[1]) < 1.1 * limit, report
    first = report.split("attempt 2")[0]
    assert first.count("stacks:") == 2
    # The end of a log, which may hold a traceback, is told beside them.
    stacks = [line for line in first.splitlines() if line.startswith("    : ")]
    outermost = [line for line in stacks if "_run_module_as_main" in line]
    assert len(outermost) == 2, first
    assert_same_end(out, whole)


def test_signal_to_the_launcher_saves_and_ends(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "signal"
    args = command(out, "--pause=0.3", of_launch=("--processes=2",))
    with Launched(out, args) as run:
        run.wait_for_step(5)
        run.process.send_signal(signal.SIGTERM)
        assert run.code() == STOPPED, run.output()
    (event,) = events(out, "stopped")
    assert event["step"] < 12
    run_to_the_end(out, "--pause=0.3", processes=2)
    assert_same_end(out, whole)


def test_four_two_and_four_workers_give_one_curve(tmp_path: Path) -> None:
    """The same global batch: half of the devices take twice the micro-batches."""
    flags = ("--mesh.data=4", "--dropout=0", "--steps=30", "--save-every=50")
    run_to_the_end(tmp_path / "whole", *flags, processes=4)
    out = tmp_path / "elastic"
    for processes, until in ((4, 8), (2, 16)):
        args = command(out, *flags, of_launch=(f"--processes={processes}",))
        with Launched(out, args) as run:
            run.wait_for_step(until)
            run.process.send_signal(signal.SIGTERM)
            assert run.code() == STOPPED, run.output()
    run_to_the_end(out, *flags, processes=4)
    assert losses(out) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert [e["step"] > 0 for e in events(out, "stopped")] == [True, True]


@pytest.mark.parametrize("kind", ["config", "data", "code"])
def test_worker_that_differs_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    out, script = tmp_path / "run", tmp_path / "differs.py"
    script.write_text(
        "import dataclasses, pathlib\n"
        "import numpy as np\n"
        "from jaxpar.cli.recipe_flags import parse\n"
        "from jaxpar.launch.worker_environment import current\n"
        "from tests.multiprocess import script\n"
        f"if current().index == 1 and {kind == 'code'}:\n"
        "    # As if this host had another version of the script.\n"
        "    __file__ = str(pathlib.Path(__file__).with_suffix('.other.py'))\n"
        "    pathlib.Path(__file__).write_text('# another version')\n"
        "config = parse(script.Config, 'x')\n"
        f"if current().index == 1 and {kind == 'config'}:\n"
        "    config = dataclasses.replace(config, steps=13)\n"
        f"if current().index == 1 and {kind == 'data'}:\n"
        "    script.np = type('np', (), {**vars(np), 'random': type('r', (), {\n"
        "        'default_rng': staticmethod(lambda _: np.random.default_rng(9))})})\n"
        "script.main(config)\n"
    )
    args = command(out, of_launch=("--processes=2",), script=script)
    with Launched(out, args) as run:
        assert run.code() == REFUSED, run.output()
        told = run.output()
    what = {
        "config": "config steps is 13, not 12",
        "data": "data corpus_sha256 is",
        "code": "code of the script is",
    }
    assert re.search(rf"worker 1 \(.*\): {what[kind]}", told)
    assert "compile" not in told
    assert not (out / "checkpoints").exists()


def test_slow_worker_is_named_within_twenty_steps(tmp_path: Path) -> None:
    """Stopped for half of the time, in turns shorter than what is measured."""
    out = tmp_path / "slow"
    flags = ("--steps=400", "--save-every=400")
    with Launched(out, command(out, *flags, of_launch=("--processes=2",))) as run:
        run.wait_for_step(10)
        slowed, began = run.workers()[1], run.beat().step
        while "slow at step" not in run.output() and not run.is_at(began + 40):
            until = time.monotonic() + 0.006
            slowed.suspend()
            time.sleep(0.003)
            slowed.resume()
            # As long as it was stopped, whatever the calls take.
            time.sleep(max(0.0, until - time.monotonic()))
        assert "slow at step" in run.output(), run.output()
    (event,) = events(out, "slow")
    assert event["worker"] == 1
    assert event["step"] <= began + 20
    assert 1.5 < event["times"] < 3.5


def test_worker_that_waits_for_its_data_is_named(tmp_path: Path) -> None:
    """Its batches take as long as a step; the others wait for it in the step."""
    script = tmp_path / "waits.py"
    script.write_text(
        "from jaxpar.cli.recipe_flags import parse\n"
        "from tests.multiprocess import script\n"
        "script.main(parse(script.Config, 'x'), pauses={1: 0.5})\n"
    )
    out = tmp_path / "run"
    flags = ("--steps=25", "--save-every=100")
    with Launched(
        out, command(out, *flags, of_launch=("--processes=2",), script=script)
    ) as run:
        assert run.code() == 0, run.output()
    (event,) = events(out, "slow")
    assert event["worker"] == 1
    assert event["step"] <= 20
    assert "worker 1 is" in run.report()
    assert "waiting for its data" in event["why"]
    numbers = [
        r
        for r in read_metrics(out / "metrics.jsonl")
        if "workers/data_seconds_max" in r
    ]
    assert len(numbers) >= 4
    for each in numbers[1:]:
        assert (
            each["workers/data_seconds_min"]
            < 0.1
            < 0.4
            < each["workers/data_seconds_max"]
        )
        assert each["workers/memory_gb_max"] >= each["workers/memory_gb_median"] > 0.05


@pytest.mark.parametrize("kills", [5, 50])
def test_soak_of_kills_ends_as_undisturbed(
    kills: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each attempt gets one step further at least, and then a worker is killed."""
    if kills == 50 and not request.config.getoption("--soak"):
        pytest.skip("half an hour: pytest --soak")
    steps = 2 * kills + 4
    flags = (f"--steps={steps}", "--save-every=1", "--pause=0.1")
    whole, out = tmp_path / "whole", tmp_path / "run"
    run_to_the_end(whole, *flags, processes=2)
    rng = random.Random(0)
    launch = ("--processes=2", "--restarts=1000")
    with Launched(out, command(out, *flags, of_launch=launch)) as run:
        for attempt in range(1, kills + 1):
            run.until(lambda n=attempt: run.attempt() == n, f"attempt {attempt}")
            run.until(run.has_gained, f"a step of attempt {attempt}")
            time.sleep(rng.uniform(0.0, 0.4))
            run.kill_a_worker(rng.randrange(2))
        assert run.code() == 0, run.output()
    assert_same_end(out, whole, steps)
    told = run.output()
    assert f"{kills + 1} starts" in told
    assert "goodput" in told


def test_worker_with_too_few_devices_is_named(tmp_path: Path) -> None:
    out = tmp_path / "run"
    launch = ("--processes=2", "--local-devices=1")
    with Launched(out, command(out, "--mesh.data=4", of_launch=launch)) as run:
        assert run.code() == REFUSED, run.output()
        told = run.output()
    assert "needs 4 devices, but 2 workers have 2" in told
    assert "choose a smaller mesh, or start more workers" in told
    assert told.count("launch: ValueError") == 1


def test_run_goes_on_without_a_host_that_is_lost(tmp_path: Path) -> None:
    """Two supervisors on one address; one is killed, and its workers with it."""
    flags = ("--mesh.data=4", "--dropout=0", "--steps=16", "--pause=0.5")
    run_to_the_end(tmp_path / "whole", *flags, processes=1)
    out = tmp_path / "run"
    launch = (
        "--hosts=2",
        "--least-hosts=1",
        "--limits.lost=5",
        "--limits.rendezvous=8",
    )
    hosts = [command(out, *flags, of_launch=(*launch, f"--host={i}")) for i in range(2)]
    with Launched(out, hosts[0]) as first, Launched(out, hosts[1]) as second:
        first.wait_for_save(4)
        second.process.kill()
        assert first.code() == 0, first.output()
        report = first.report()
    assert "host 1: failed: its supervisor does not answer" in report
    assert losses(out) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert [account["resumed"] for account in read_account(out)] == [0, 4]
    assert len(list((out / "launch" / "0002").glob("*.log"))) == 1
