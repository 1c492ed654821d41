"""Do real supervisors keep hosts on a virtual clock at work, whichever are lost?"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.virtual_hosts import World
from jaxpar.launch.exit_codes import GAVE_UP
from jaxpar.launch.limits import Limits
from jaxpar.launch.start import Launch

LIMITS = Limits(lost=15.0, rendezvous=60.0, save=600.0)


class Work:
    """Workers that never fail by themselves; what the last attempt has done."""

    step, resumed = 9, 3

    def started(self, now: float, worker: Any) -> None:
        """Nothing."""

    def stop(self, now: float) -> None:
        """Nothing."""


@pytest.fixture
def world(tmp_path: Path) -> Any:
    def made(hosts: int = 5, **options: Any) -> World:
        launch = Launch(("x",), tmp_path, hosts=hosts, port=1, limits=LIMITS, **options)
        return World(launch, Work())

    return made


def begun(world: World) -> World:
    """All hosts are there and run the first attempt."""
    for host in range(world.launch.hosts):
        world.start(host)
    world.run(5.0)
    assert attempt(world) == (1, "run", 0, set(range(world.launch.hosts)))
    return world


def attempt(world: World) -> tuple:
    found = world.attempt
    return (found.number, found.state, found.head, set(found.members))


def test_killed_worker_restarts_all(world: Any) -> None:
    with world() as hosts:
        begun(hosts)
        hosts.kill_worker(3)
        hosts.run(20.0)
        assert attempt(hosts) == (2, "run", 0, {0, 1, 2, 3, 4})
        assert all(host.board.me.running for host in hosts.hosts.values())


def test_lowest_host_leads_after_the_leader_and_its_next_one_are_lost(
    world: Any,
) -> None:
    with world(least_hosts=3) as hosts:
        begun(hosts)
        hosts.kill_host(0, back_after=1e9)
        hosts.kill_host(1, back_after=1e9)
        hosts.run(18.0)
        assert hosts.leader.host == 0, "silent, but not for the limit"
        hosts.run(40.0)
        assert (hosts.leader.host, hosts.lease) == (2, 2)
        hosts.run(120.0)
        assert attempt(hosts) == (2, "run", 2, {2, 3, 4})
        assert "the supervisor of host 0 is lost: host 2 leads now" in hosts.lines[0]


def test_lost_leader_follows_in_its_new_place(world: Any) -> None:
    with world() as hosts:
        begun(hosts)
        hosts.kill_host(0, back_after=30.0)
        hosts.run(60.0)
        assert attempt(hosts) == (2, "run", 1, {0, 1, 2, 3, 4})
        # And leads again when the other one is lost.
        hosts.kill_host(1, back_after=40.0)
        hosts.run(130.0)
        assert attempt(hosts) == (3, "run", 0, {0, 1, 2, 3, 4})


@pytest.mark.parametrize("bad", [4, 0])
def test_host_that_fails_three_times_is_left_out(world: Any, bad: int) -> None:
    """If it leads, another host does after it."""
    with world(least_hosts=4) as hosts:
        begun(hosts)
        for number in (1, 2, 3):
            assert hosts.attempt.number == number
            hosts.kill_worker(bad)
            hosts.run(hosts.now + 30.0)
        if bad == 0:
            assert hosts.codes == {0: GAVE_UP}
            hosts.run(hosts.now + 30.0)
        left = {0, 1, 2, 3, 4} - {bad}
        assert attempt(hosts) == (4, "run", min(left), left)
        if bad == 4:
            assert not hosts.hosts[4].board.me.running
            assert not hosts.codes, "it waits for the end, or for its turn"
