"""Does a run on two hosts go on from memory when one of them is lost, to the bit?"""

from pathlib import Path

import pytest

from benchmarks.memory_kills import Config, drill, memory_of
from tests.multiprocess.launching import environment, run_to_the_end
from tests.multiprocess.test_launch import assert_same_end
from tests.runs import events

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.mark.parametrize("kills", [3, 40])
def test_lost_workers_launchers_and_hosts_cost_few_steps(
    kills: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By turns; each time the other host's memory has what is missing."""
    if kills == 40 and not request.config.getoption("--soak"):
        pytest.skip("a quarter of an hour: pytest --soak")
    config, out = Config(kills=kills, pause=0.1), tmp_path / "run"
    steps = (kills + 1) * (2 * config.every + 2)
    found = drill(out, config, environment())
    assert [each.kind for each in found[:3]] == ["worker", "launcher", "host"]
    for each in found:
        assert 0 <= each.done - each.resumed <= config.every, each
        assert each.resumed % config.every == 0
    assert len(events(out, "restored from memory")) == kills
    assert [memory_of(out, host) for host in range(2)] == [[], []]
    run_to_the_end(
        *(tmp_path / "whole", f"--steps={steps}", f"--save-every={steps}"), processes=2
    )
    assert_same_end(out, tmp_path / "whole", steps)
