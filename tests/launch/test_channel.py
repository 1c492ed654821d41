"""Are messages of supervisors whole, in order, and of nobody without the secret?"""

import collections
import itertools
import socket

import pytest

from jaxpar.launch import channel
from jaxpar.launch.channel import Channel, ChannelError
from tests.launch.connections import SECRET, opened

OTHER = bytes([1]) * 32


def ends(secret: bytes = SECRET) -> tuple[Channel, Channel]:
    """A server's and a client's end."""
    first, second = connected()
    return of(first, serves=True), of(second, secret, serves=False)


def of(connection: socket.socket, secret: bytes = SECRET, *, serves: bool) -> Channel:
    return opened(Channel(connection, secret, serves=serves))


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        second = socket.create_connection(listener.getsockname())
        return listener.accept()[0], second


def exchange(*channels: Channel) -> list:
    """What all have received, after some turns."""
    return [each for _ in range(4) for one in channels for each in one.receive()]


@pytest.fixture
def pair() -> tuple[Channel, Channel]:
    return ends()


def test_messages_arrive_in_order_both_ways(pair: tuple[Channel, Channel]) -> None:
    server, client = pair
    client.send(3)
    client.send({"a": [1, None, "ü"]})
    server.send("back")
    assert not server.is_known
    found = exchange(server, client)
    assert [each for each in found if each != "back"] == [3, {"a": [1, None, "ü"]}]
    assert "back" in found
    assert server.is_known
    assert client.is_known
    assert (server.messages, client.messages) == (3, 3)


def test_message_larger_than_a_buffer_comes_whole(
    pair: tuple[Channel, Channel],
) -> None:
    server, client = pair
    client.send(0)
    exchange(server, client)
    big = "x" * 1_500_000
    client.send(big)
    found: list = []
    while not found:
        found += exchange(server, client)
    assert found == [big]


def test_what_was_sent_before_the_end_is_read(pair: tuple[Channel, Channel]) -> None:
    server, client = pair
    client.send(1)
    exchange(server, client)
    client.send(2)
    client.close()
    assert server.receive() == [2]
    with pytest.raises(ChannelError, match="has closed the connection"):
        server.receive()


def test_other_secret_is_refused() -> None:
    server, client = ends(OTHER)
    client.send(1)
    with pytest.raises(ChannelError, match="another secret"):
        exchange(client, server)


@pytest.mark.parametrize("length", [channel._FIRST_BYTES + 1, 2**32 - 1])
def test_stranger_can_send_little(length: int) -> None:
    """Before it has shown that it has the secret, a message is a few kilobytes."""
    inside, outside = connected()
    server = of(inside, serves=True)
    outside.sendall(bytes(16) + length.to_bytes(4) + bytes(40))
    with pytest.raises(ChannelError, match=f"{length} bytes is too long"):
        exchange(server)
    outside.close()


def test_who_connects_takes_a_long_first_message(
    pair: tuple[Channel, Channel],
) -> None:
    """As the announcement of hundreds of hosts is."""
    server, client = pair
    client.send(1)
    server.send("x" * 100_000)
    found = exchange(client, server)
    assert sorted(len(str(each)) for each in found) == [1, 100_000]


def recorded(server: socket.socket, client: Channel) -> bytes:
    """What a client sends, as somebody between the two sees it."""
    end = of(server, serves=True)
    client.receive()
    end.send("x")
    client.receive()
    return server.recv(1 << 16)


def test_changed_or_repeated_bytes_are_refused() -> None:
    """A recording fits no other connection, and no other place of its own."""
    first, second = connected()
    client = of(second, serves=False)
    client.send(7)
    whole = recorded(first, client)
    assert len(whole) > 16 + 36
    for stream in (whole, whole + whole[16:]):
        inside, outside = connected()
        again = of(inside, serves=True)
        outside.sendall(stream)
        with pytest.raises(ChannelError, match="another secret"):
            exchange(again)
        outside.close()


def test_message_that_is_repeated_within_its_connection_is_refused() -> None:
    """By somebody who passes on what both send, and one message twice."""
    (inside, to_server), (to_client, outside) = connected(), connected()
    server, client = of(inside, serves=True), of(outside, serves=False)
    client.send(7)
    server.receive()
    for source, sink in ((to_client, to_server), (to_server, to_client)):
        sink.sendall(source.recv(1 << 16))
        server.receive()
        client.receive()
    message = to_client.recv(1 << 16)
    to_server.sendall(message)
    assert server.receive() == [7]
    to_server.sendall(message)
    with pytest.raises(ChannelError, match="another secret"):
        server.receive()
    to_server.close()
    to_client.close()


def test_one_that_reads_nothing_is_given_up(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = pair
    client.send(1)
    exchange(server, client)
    monkeypatch.setattr(channel, "_MOST_UNSENT", 1 << 16)
    fills = itertools.repeat("x" * 100_000, 1000)
    with pytest.raises(ChannelError, match="reads nothing"):
        collections.deque(map(server.send, fills))
