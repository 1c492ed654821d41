"""Does a host's connection to the leader begin, end and fail as it should?"""

import socket

import pytest

from jaxpar.launch import link as links
from jaxpar.launch.link import Link
from jaxpar.launch.store import Store
from tests.launch.connections import SECRET, joined, opened, until


def test_connection_begins_with_the_host_and_what_is_given() -> None:
    store = opened(Store("127.0.0.1", SECRET, 4))
    link = joined(store, 3)
    assert not link.is_open
    found: list = []
    until(
        lambda: len(found) == 2,
        lambda: link.poll(["first"]),
        lambda: found.extend(store.poll()),
    )
    assert found == [(3, None), (3, "first")]
    assert (link.is_open, link.error, link.messages) == (True, "", 2)
    store.close()
    until(lambda: not link.is_open, lambda: link.poll([]))
    assert link.error
    assert link.messages == 2
    link.send("to nobody")
    assert link.poll([]) == []


def test_refused_connection_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    link = opened(Link(1))
    link.connect("127.0.0.1", port, SECRET)
    until(lambda: link.error, lambda: link.poll([]))
    assert link.error == "Connection refused"
    for address, number in (("no host", port), ("a" * 99, port), ("a\0", port)):
        link.connect(address, number, SECRET)
        assert not link.is_open
        assert link.error not in ("", "Connection refused")


@pytest.mark.parametrize("port", [-1, 0, 2**16, 2**62])
def test_port_that_is_none_is_an_error(port: int) -> None:
    link = opened(Link(1))
    link.connect("127.0.0.1", port, SECRET)
    until(lambda: link.error, lambda: link.poll([]))
    assert not link.is_open


def test_connection_that_nobody_answers_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a firewall: a listener whose queue is full drops what comes."""
    monkeypatch.setattr(links, "CONNECT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        place = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for each in fillers:
            each.setblocking(False)
            each.connect_ex(place)
        link = opened(Link(1))
        link.connect(*place, SECRET)
        until(lambda: link.error, lambda: link.poll([]))
        for each in fillers:
            each.close()
    assert link.error == "Connection timed out"
    assert not link.is_open
