"""How do supervisors send each other messages that nobody else can forge or repeat?

A message is JSON, after its length and a code (HMAC-SHA256) by a secret of the run.
Each side begins with a random number; both numbers, the direction and the count of the
messages are in the code, so that a recorded message fits nowhere else. Nothing here
waits: what can't be sent or is not yet whole stays for the next call. Contents are not
encrypted, so no text of workers belongs into them.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
_NONCE_BYTES, _CODE_BYTES = 16, 32
_READ_BYTES = 1 << 16
_FIRST_BYTES = 1 << 12
"""Largest message of somebody who connects and has not shown that it has the secret."""
_MOST_BYTES = 4 << 20
_MOST_UNSENT = 16 << 20


class ChannelError(ConnectionError):
    """A connection is over, or what came is not of somebody who has the secret."""


class Channel:
    """One end of a connection.

    Args:
      connection: connected, or about to be; it is closed with this object.
      secret: of the run.
      serves: whether this is the end that was connected to.

    Attributes:
      messages: sent and received so far.
      is_known: whether the other end has shown that it has the secret.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, serves: bool):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._secret, self._serves = connection, secret, serves
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._unsent, self._unread = bytearray(self._nonce), bytearray()
        self._waiting: list[bytes] = []
        self._keys: tuple[bytes, bytes] | None = None
        self._sent = self._received = 0
        self.is_known = self._is_over = False

    @property
    def messages(self) -> int:
        """Messages sent and received so far."""
        return self._sent + self._received

    def fileno(self) -> int:
        """Of the connection, for selectors."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        self._connection.close()

    def send(self, message: Any) -> None:
        """Send a message, now or with the next call.

        Args:
          message: a value of JSON; or its bytes, which many are to be sent.

        Raises:
          ChannelError: if the connection is over, or its other end reads nothing.
        """
        is_encoded = isinstance(message, bytes)
        self._waiting.append(message if is_encoded else json.dumps(message).encode())
        self._flush()

    def receive(self) -> list[Any]:
        """The messages that have come since the last call.

        Raises:
          ChannelError: if the connection is over, or a message is not by the secret.
        """
        most = _READ_BYTES if self._serves and not self.is_known else _MOST_BYTES
        try:
            while new := self._connection.recv(_READ_BYTES):
                self._unread += new
                if len(self._unread) >= most:
                    break
            self._is_over = not new
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            raise ChannelError(str(error)) from error
        found = self._messages()
        if self._is_over and not found:
            raise ChannelError("the other end has closed the connection")
        with contextlib.suppress(ChannelError):  # What has come is read first.
            self._flush()
        return found

    def _flush(self) -> None:
        if self._keys is not None:
            for body in self._waiting:
                code = _code(self._keys[0], self._sent, body)
                self._unsent += _LENGTH.pack(len(body)) + code + body
                self._sent += 1
            self._waiting.clear()
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            if len(self._unsent) > _MOST_UNSENT:
                raise ChannelError("the other end reads nothing") from None
        except OSError as error:
            raise ChannelError(str(error)) from error

    def _messages(self) -> list[Any]:
        if self._keys is None:
            if len(self._unread) < _NONCE_BYTES:
                return []
            self._agree(bytes(self._unread[:_NONCE_BYTES]))
            del self._unread[:_NONCE_BYTES]
        assert self._keys is not None
        found = []
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            is_stranger = self._serves and not self.is_known
            if length > (_FIRST_BYTES if is_stranger else _MOST_BYTES // 2):
                raise ChannelError(f"a message of {length} bytes is too long")
            begin = _LENGTH.size + _CODE_BYTES
            if len(self._unread) < begin + length:
                break
            code = bytes(self._unread[_LENGTH.size : begin])
            body = bytes(self._unread[begin : begin + length])
            right = _code(self._keys[1], self._received, body)
            if not hmac.compare_digest(code, right):
                raise ChannelError("a message has another secret")
            del self._unread[: begin + length]
            self._received, self.is_known = self._received + 1, True
            found.append(json.loads(body))
        return found

    def _agree(self, other: bytes) -> None:
        """Make the keys of both directions of this connection."""
        nonces = self._nonce + other if self._serves else other + self._nonce
        of_server, of_client = (
            hmac.digest(self._secret, side + nonces, hashlib.sha256)
            for side in (b"server", b"client")
        )
        both = (of_server, of_client) if self._serves else (of_client, of_server)
        self._keys = both


def _code(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8) + body, hashlib.sha256)
