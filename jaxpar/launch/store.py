"""What does the leading supervisor hear of the others, over one connection each?

The leader listens, the others connect. All is done in `Store.poll`, which the leader
calls ten times a second and which never waits: no threads, no locks.
"""

import contextlib
import json
import resource
import selectors
import socket
import time
from collections.abc import Set
from typing import Any

from jaxpar.launch.channel import Channel, ChannelError

_UNKNOWN_SECONDS = 10.0
"""Time for whoever has connected to show that it has the secret."""
_UNKNOWN = 64
"""Connections of nobody known, beyond one for each host."""
_OWN_FILES = 256


class Store:
    """The leader's end of all connections.

    Args:
      address: of this host, where the others reach it.
      secret: of the run.
      hosts: how many there are.

    Raises:
      OSError: if this host can't listen on the address.
    """

    def __init__(self, address: str, secret: bytes, hosts: int):
        address = address.strip("[]")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._secret, self._hosts = secret, hosts
        _allow_files(hosts + _UNKNOWN + _OWN_FILES)
        self._listener = socket.create_server(
            (address, 0), family=family, backlog=max(hosts, 128)
        )
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._unknown: dict[Channel, float] = {}
        self._host_of: dict[Channel, int] = {}
        self._channels: dict[int, Channel] = {}
        self._closed_messages = 0

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.getsockname()[1]

    @property
    def connected(self) -> Set[int]:
        """The hosts that are connected."""
        return self._channels.keys()

    @property
    def messages(self) -> int:
        """Messages sent and received so far."""
        own = sum(channel.messages for channel in self._host_of)
        return self._closed_messages + own

    def poll(self) -> list[tuple[int, Any]]:
        """What has come since the last call: (host, message), in order.

        The message of a host that has just connected is None.
        """
        found: list[tuple[int, Any]] = []
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            else:
                assert isinstance(key.fileobj, Channel)
                self._read(key.fileobj, found)
        late = time.monotonic() - _UNKNOWN_SECONDS
        for channel in [each for each, since in self._unknown.items() if since < late]:
            self._close(channel)
        return found

    def send(self, host: int, message: Any) -> None:
        """Send a message to a host, if it is connected."""
        channel = self._channels.get(host)
        if channel is None:
            return
        try:
            channel.send(message)
        except ChannelError:
            self._close(channel)

    def send_all(self, message: Any) -> None:
        """Send a message to all hosts that are connected."""
        body = json.dumps(message).encode()  # Once: it names every host.
        for host in [*self._channels]:
            self.send(host, body)

    def drop(self, host: int) -> None:
        """Close the connection of a host."""
        if host in self._channels:
            self._close(self._channels[host])

    def close(self) -> None:
        """Close all connections, and listen no more; safe to call twice."""
        if self._listener.fileno() < 0:
            return
        for channel in [*self._unknown, *self._host_of]:
            self._close(channel)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    connection, _ = self._listener.accept()
                except (ConnectionError, InterruptedError):
                    continue
                except OSError as error:
                    if isinstance(error, BlockingIOError):
                        raise
                    return  # Out of files: the others wait, or go by the disk.
                if len(self._unknown) + len(self._host_of) >= self._hosts + _UNKNOWN:
                    connection.close()
                    continue
                channel = Channel(connection, self._secret, serves=True)
                self._unknown[channel] = time.monotonic()
                self._selector.register(channel, selectors.EVENT_READ)

    def _read(self, channel: Channel, found: list[tuple[int, Any]]) -> None:
        """Read a connection, whose first message is the number of its host."""
        try:
            for message in channel.receive():
                if channel not in self._host_of:
                    self._know(channel, message)
                    found.append((message, None))
                else:
                    found.append((self._host_of[channel], message))
        except (ChannelError, ValueError, RecursionError):
            self._close(channel)

    def _know(self, channel: Channel, host: Any) -> None:
        if type(host) is not int or not 0 <= host < self._hosts:
            raise ChannelError(f"{str(host)[:40]!r} is not the number of a host")
        self.drop(host)  # Of a supervisor of before.
        del self._unknown[channel]
        self._host_of[channel], self._channels[host] = host, channel

    def _close(self, channel: Channel) -> None:
        host = self._host_of.pop(channel, None)
        if host is not None and self._channels.get(host) is channel:
            del self._channels[host]
        self._unknown.pop(channel, None)
        self._closed_messages += channel.messages
        self._selector.unregister(channel)
        channel.close()


def _allow_files(number: int) -> None:
    """Raise the limit of open files, as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        new = number if hard == resource.RLIM_INFINITY else min(number, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
