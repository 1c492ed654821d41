"""Are links as slow as they say, and what is said of them true?

Real processes in network namespaces of their own; nothing here is simulated.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import slow_network
from benchmarks.network.fit import Fit, crossover, fit
from benchmarks.network.group import Group, Turn
from benchmarks.network.hosts import (
    Network,
    NetworkError,
    burst_bytes,
    check_possible,
)
from benchmarks.network.techniques import (
    ONE_BIT,
    PLAIN,
    RUN_STEPS,
    RUN_WARM_STEPS,
    TECHNIQUES,
    WHOLE_RUN,
    Technique,
)
from benchmarks.slow_network import TOY, Rates, measure, sent
from tests.multiprocess.launching import ROOT, environment

MEGABITS = 100.0
NUM_PARAMS = TOY.layers * TOY.width**2
SCRIPT = ROOT / "benchmarks" / "slow_network.py"


@pytest.fixture(scope="module")
def possible() -> None:
    try:
        check_possible()
    except NetworkError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def measured(possible: None) -> dict[str, Rates]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment().items():
            patched.setenv(name, value)
        return measure(TOY, 2)


def fastest(turns: list[Turn]) -> float:
    """Seconds of a step: of the turn that other work on this machine slowed least."""
    return min(turn.seconds for turn in turns)


def spaces() -> list[str]:
    """Namespaces of this process's networks."""
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if f"r{os.getpid()}-" in line]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_plain_step_takes_its_bytes_over_the_bandwidth(
    measured: dict[str, Rates],
) -> None:
    """All of a host's gradients leave it: 4 bytes a parameter, on two hosts."""
    least = 8 * (4 * NUM_PARAMS - burst_bytes(MEGABITS)) / (1e6 * MEGABITS)
    assert least <= fastest(measured[PLAIN][MEGABITS]) < 2 * least
    # It is the link that takes the time, not the step.
    assert fastest(measured[PLAIN][math.inf]) < least / 2


@pytest.mark.multiprocess
@pytest.mark.thorough
def test_link_counts_the_bytes_of_each_technique(measured: dict[str, Rates]) -> None:
    """Of n gradients plain sends 4 n, others two halves of their codes; and headers.

    Those that exchange once in several steps, so much less a step.
    """
    codes = {
        PLAIN: 4.0,
        "8-bit gradients": (256 + 4) / 256,
        "4-bit gradients": (128 + 4) / 256,
        ONE_BIT: 1 / 8,
        "0/1 Adam, signs every 4 steps": 1 / 32,
        "DiLoCo, joined every 16 steps": 4 / 16,
    }
    assert set(measured) == set(TECHNIQUES)
    for name, of_each in codes.items():
        for turns in measured[name].values():
            assert sent(turns) >= of_each * NUM_PARAMS, name
            assert sent(turns) < 1.1 * of_each * NUM_PARAMS + 20_000, name


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_run_sends_its_warm_up_and_a_share_of_the_rest(possible: None) -> None:
    """In fp32 a 32nd: of w warm steps in each, w + (1 - w) / 32."""
    model = {"width": TOY.width, "layers": TOY.layers, "rows": TOY.rows}
    with Network(2) as network, Group(network, **model) as group:
        turn = group.take(WHOLE_RUN, 0, RUN_STEPS)
    warm = RUN_WARM_STEPS / RUN_STEPS
    share = warm + (1 - warm) / 32
    assert turn.sent / (4 * NUM_PARAMS) == pytest.approx(share, rel=0.03)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_compressed_steps_are_faster_on_a_slow_link(
    measured: dict[str, Rates],
) -> None:
    for name, turns in measured.items():
        if name != PLAIN:
            plain = fastest(measured[PLAIN][MEGABITS])
            assert fastest(turns[MEGABITS]) < plain, name
        assert all(math.isfinite(turn.loss) for turn in turns[MEGABITS])
    assert not spaces()


def test_links_are_limited_both_ways(possible: None) -> None:
    with Network(3) as network:
        for megabits, count in ((50.0, 6), (None, 0), (None, 0)):
            network.limit(megabits)
            shown = [
                subprocess.run(
                    ["tc", "-n", space, "qdisc", "show"],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
                for space in spaces()
            ]
            assert "".join(shown).count("rate 50Mbit") == count


def test_hosts_are_removed_with_their_network(possible: None) -> None:
    with Network(2) as network:
        assert len(spaces()) == 3
        ping = network.command(0, [sys.executable, "-c", _CONNECT])
        done = subprocess.run([*ping, network.addresses[1]], check=False)
        assert done.returncode == 0
    assert not spaces()


# Nobody listens there: a host that answers refuses at once.
_CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=5)
except ConnectionRefusedError:
    sys.exit(0)
sys.exit(1)
"""


def run(*flags: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags],
        env=environment() | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_namespaces_nothing_is_started(tmp_path: Path) -> None:
    done = run("--toy", PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "'ip' is missing: install iproute2. Nothing was started." in done.stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rounds": 0}, "--rounds 0 must be at least 1."),
        ({"megabits": (0.0,)}, r"--megabits \(0.0,\) must be rates above 0."),
        ({"processes": (1,)}, r"--processes \(1,\) must be from 2 to 200."),
        ({"only": "sgd"}, "--only 'sgd' must be in one of 'plain Adam', '8-bit"),
    ],
)
def test_settings_that_measure_nothing_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slow_network.check(slow_network.Config(**fields))


def test_fit_finds_compute_and_bytes() -> None:
    exact = {rate: 0.2 + 8 * 3e7 / (1e6 * rate) for rate in (100.0, 1000.0)}
    found = fit(exact | {math.inf: 0.2})
    assert found == Fit(
        pytest.approx(0.2), pytest.approx(3e7), pytest.approx(0, abs=1e-6)
    )
    assert found.seconds(100.0) == pytest.approx(exact[100.0])
    assert fit({100.0: 0.4, math.inf: 0.5}).sent == 0
    assert fit({100.0: 2.0, 1000.0: 0.3, math.inf: 0.2}).error > 0.05


def test_techniques_take_the_same_time_where_they_meet() -> None:
    plain, other = Fit(0.1, 3e7, 0.0), Fit(0.4, 1e6, 0.0)
    at = crossover(plain, other)
    assert plain.seconds(at) == pytest.approx(other.seconds(at))
    assert plain.seconds(2 * at) < other.seconds(2 * at)
    assert crossover(plain, Fit(0.1, 1e6, 0.0)) == math.inf
    assert crossover(plain, Fit(0.2, 4e7, 0.0)) == 0


def test_turn_is_of_whole_periods() -> None:
    local = Technique(dict, period=8)
    assert [local.steps(wanted) for wanted in (1, 8, 9)] == [8, 8, 16]
