"""How does a supervisor keep its one connection to the leader's?"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from jaxpar.launch.channel import Channel, ChannelError

CONNECT_SECONDS = 5.0


class Link:
    """A connection to the leader, while there is one.

    Args:
      host: the number of this host.

    Attributes:
      error: why the last try to connect failed; empty if it did not.
      messages: sent and received, over all connections.
    """

    def __init__(self, host: int):
        self._host = host
        self._channel: Channel | None = None
        self._connecting: tuple[socket.socket, bytes, float] | None = None
        self._closed_messages = 0
        self.error = ""

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._channel is not None

    @property
    def messages(self) -> int:
        """Messages sent and received, over all connections."""
        own = 0 if self._channel is None else self._channel.messages
        return self._closed_messages + own

    def connect(self, address: str, port: int, secret: bytes) -> None:
        """Begin to connect; nothing is done while that is under way.

        Args:
          address: of the leader's host.
          port: where it listens.
          secret: of the run.
        """
        if self._connecting is not None:
            return
        self.close()
        address = address.strip("[]")
        try:
            family, *_, place = socket.getaddrinfo(
                address, port, type=socket.SOCK_STREAM
            )[0]
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.setblocking(False)
            code = connection.connect_ex(place)
        except OSError as error:
            self.error = error.strerror or str(error)
            return
        except (ValueError, OverflowError) as error:  # No name, or no port.
            self.error = str(error)
            return
        if code not in (0, errno.EINPROGRESS):
            self._refused(connection, code)
            return
        self._connecting = connection, secret, time.monotonic() + CONNECT_SECONDS

    def poll(self, after_connecting: Sequence[Any]) -> list[Any]:
        """The messages that have come since the last call.

        Args:
          after_connecting: messages that a new connection begins with.
        """
        self._finish_connecting(after_connecting)
        if self._channel is None:
            return []
        try:
            return self._channel.receive()
        except (ChannelError, ValueError, RecursionError) as error:
            self.error = str(error)
            self.close()
            return []

    def send(self, message: Any) -> None:
        """Send a message, if there is a connection."""
        if self._channel is None:
            return
        try:
            self._channel.send(message)
        except ChannelError as error:
            self.error = str(error)
            self.close()

    def close(self) -> None:
        """End the connection, or the try to have one."""
        if self._channel is not None:
            self._closed_messages += self._channel.messages
            self._channel.close()
            self._channel = None
        if self._connecting is not None:
            self._connecting[0].close()
            self._connecting = None

    def _finish_connecting(self, first: Sequence[Any]) -> None:
        if self._connecting is None:
            return
        connection, secret, until = self._connecting
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._connecting = None
            self._refused(connection, code)
            return
        try:
            connection.getpeername()
        except OSError:  # Not yet.
            if time.monotonic() > until:
                self._connecting = None
                self._refused(connection, errno.ETIMEDOUT)
            return
        self._connecting, self.error = None, ""
        self._channel = Channel(connection, secret, serves=False)
        for message in (self._host, *first):
            self.send(message)

    def _refused(self, connection: socket.socket, code: int) -> None:
        self.error = os.strerror(code)
        with contextlib.suppress(OSError):
            connection.close()
