"""Does the leader hear whom it knows, whatever others send it?"""

import contextlib
import json
import random
import socket
import struct
import tracemalloc
from typing import Any

import pytest

from jaxpar.launch import store as stores
from jaxpar.launch.channel import Channel
from jaxpar.launch.link import Link
from jaxpar.launch.store import Store
from tests.launch.connections import joined, until


def heard(store: Store, *links: Link, count: int) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []

    def turn() -> None:
        for link in links:
            link.poll([])
        found.extend(store.poll())

    until(lambda: len(found) >= count, turn)
    return found


def test_hosts_are_heard_by_their_numbers(store: Store) -> None:
    links = [joined(store, host) for host in (1, 5)]
    assert sorted(heard(store, *links, count=2)) == [(1, None), (5, None)]
    assert store.connected == {1, 5}
    links[1].send({"a": 1})
    assert heard(store, *links, count=1) == [(5, {"a": 1})]
    store.send(1, "to one")
    store.send(7, "to nobody")
    got: list[Any] = []
    until(lambda: got, lambda: got.extend(links[0].poll([])), store.poll)
    assert (got, links[1].poll([])) == (["to one"], [])
    assert store.messages == 2 + 1 + 1
    links[0].close()
    until(lambda: store.connected == {5}, store.poll)
    assert store.messages == 2 + 1 + 1, "those of closed connections too"
    store.send_all({"to": "all"})
    until(lambda: len(got) == 2, lambda: got.extend(links[1].poll([])), store.poll)
    assert got[1] == {"to": "all"}


def test_new_supervisor_of_a_host_replaces_the_old_one(store: Store) -> None:
    old = joined(store, 1)
    heard(store, old, count=1)
    new = joined(store, 1)
    heard(store, old, new, count=1)
    store.send(1, "x")
    got: list[Any] = []
    until(lambda: got, lambda: got.extend(new.poll([])), store.poll)
    old.poll([])
    assert not old.is_open


@pytest.mark.parametrize("first", [8, -1, "1", True, None, {"host": 1}])
def test_number_of_no_host_closes_the_connection(store: Store, first: Any) -> None:
    link = joined(store, 1)
    link._host = first
    until(lambda: link.is_open, lambda: link.poll([]))
    until(lambda: not link.is_open, lambda: link.poll([]), store.poll)
    assert not store.connected


def test_stranger_is_closed_after_a_while(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = joined(store, 1)
    heard(store, link, count=1)
    monkeypatch.setattr(stores, "_UNKNOWN_SECONDS", 0.05)
    with socket.create_connection(("127.0.0.1", store.port)) as stranger:
        stranger.settimeout(5)
        until(lambda: len(store._unknown) == 1, store.poll)
        until(lambda: not store._unknown, store.poll)
        assert stranger.recv(64) == b""
    assert store.connected == {1}


def test_strangers_leave_room_for_hosts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_UNKNOWN", 4)
    address = ("127.0.0.1", store.port)
    strangers = [socket.create_connection(address) for _ in range(30)]
    until(lambda: len(store._unknown) == 12, store.poll)
    for each in strangers:
        each.close()
    until(lambda: not store._unknown, store.poll)
    link = joined(store, 1)
    assert heard(store, link, count=1) == [(1, None)]


def stream(rng: random.Random) -> bytes:
    """What a client with the secret or without it might send, changed."""
    values = [rng.randrange(8), {"member": {"host": 1}}, [], "x" * rng.randrange(99)]
    bodies = [json.dumps(each).encode() for each in values]
    if rng.random() < 0.3:
        bodies[rng.randrange(4)] = b"[" * rng.randrange(100_000)
    own = bytearray(rng.randbytes(16))
    for body in bodies:
        length = len(body) if rng.random() < 0.8 else rng.randrange(2**32)
        own += length.to_bytes(4) + rng.randbytes(32) + body
    for _ in range(rng.randrange(4)):
        own[rng.randrange(len(own))] ^= 1 << rng.randrange(8)
    return bytes(own[: rng.randrange(len(own) + 1)])


def attack(store: Store, count: int) -> None:
    link, rng = joined(store, 1), random.Random(29)
    heard(store, link, count=1)
    tracemalloc.start()
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", store.port)) as stranger:
            # Closed at once, so that ten thousand don't use up the ports.
            linger = struct.pack("ii", 1, 0)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            stranger.settimeout(0.5)
            with contextlib.suppress(OSError):
                stranger.sendall(stream(rng))
            assert store.poll() == []
    assert tracemalloc.get_traced_memory()[1] < 100_000_000
    tracemalloc.stop()
    link.send("still here")
    assert heard(store, link, count=1) == [(1, "still here")]


def test_bytes_of_strangers_harm_nobody(store: Store) -> None:
    attack(store, 100)


@pytest.mark.thorough
def test_ten_thousand_strangers_harm_nobody(store: Store) -> None:
    attack(store, 10_000)


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b"\xff", b"1e"])
def test_known_host_that_sends_no_json_is_closed(store: Store, body: bytes) -> None:
    """It has the secret, and its own connection is all that ends."""
    other, bad = joined(store, 1), joined(store, 2)
    heard(store, other, bad, count=2)
    assert isinstance(bad._channel, Channel)
    bad._channel._waiting.append(body)
    bad._channel._flush()
    until(lambda: store.connected == {1}, store.poll)
    other.send(0)
    assert heard(store, other, count=1) == [(1, 0)]
