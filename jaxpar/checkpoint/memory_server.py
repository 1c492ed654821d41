"""How does a process get files of the memory of another host, and give its own?

Each process serves its host's folder to the others of the run, over TCP. A request is
JSON with the run's token, which the processes have from one another; without it a
connection is closed.
"""

import contextlib
import hmac
import json
import os
import re
import socket
import socketserver
import struct
import threading
from pathlib import Path
from typing import Any

SECONDS = 60.0
"""Silence of the other side after which a transfer has failed."""
_POLL_SECONDS = 0.05
_LENGTH = struct.Struct("<I")
_MOST_BYTES, _BLOCK = 4096, 1 << 20
_FILE = re.compile(r"process-\d{1,7}\.[01]")


class MemoryServer:
    """Serves a folder to the run's other processes until it is closed.

    Args:
      folder: of this host's files.
      address: to listen on.
      token: that the run's processes know.
    """

    def __init__(self, folder: Path, address: str, token: str):
        self._folder, self._token = folder, token
        is_v6 = ":" in address
        kind = _Server6 if is_v6 else _Server
        self._server = kind((address, 0), self._handler())
        self.address = address, int(self._server.server_address[1])
        threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_SECONDS,),
            name="memory",
            daemon=True,
        ).start()

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def put(self, to: tuple[str, int], name: str) -> None:
        """Give another host a file of this one's.

        Raises:
          OSError: if it does not take it.
        """
        with (self._folder / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            with self._asked(to, "put", name, size) as (connection, _):
                connection.sendfile(file)
                if _receive(connection)["error"]:
                    raise OSError(f"{to[0]} has no room for {name!r}")

    def get(self, source: tuple[str, int], name: str) -> None:
        """Copy a file of another host's into this one's folder.

        Raises:
          OSError: if it can't be had.
        """
        with self._asked(source, "get", name, 0) as (connection, answer):
            if answer["error"]:
                raise OSError(f"{source[0]} has no {name!r} in memory")
            _take(connection, self._folder / name, answer["size"])

    @contextlib.contextmanager
    def _asked(self, to: tuple[str, int], what: str, name: str, size: int) -> Any:
        with socket.create_connection(to, SECONDS) as connection:
            asked = {"token": self._token, "what": what, "name": name, "size": size}
            _send(connection, asked)
            yield connection, _receive(connection)

    def _handler(self) -> type[socketserver.BaseRequestHandler]:
        server = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.settimeout(SECONDS)
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    server._serve(self.request)

        return Handler

    def _serve(self, connection: socket.socket) -> None:
        asked = _receive(connection)
        given = str(asked["token"]).encode()
        if not hmac.compare_digest(given, self._token.encode()):
            return
        if not _FILE.fullmatch(asked["name"]):
            return
        path = self._folder / asked["name"]
        if asked["what"] == "put":
            _send(connection, {"error": False, "size": 0})
            try:
                _take(connection, path, int(asked["size"]))
            except OSError:
                _send(connection, {"error": True, "size": 0})
                raise
            _send(connection, {"error": False, "size": 0})
            return
        try:
            file = path.open("rb")
        except OSError:
            _send(connection, {"error": True, "size": 0})
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            _send(connection, {"error": False, "size": size})
            connection.sendfile(file)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads, allow_reuse_address = True, True


class _Server6(_Server):
    address_family = socket.AF_INET6


def _take(connection: socket.socket, path: Path, size: int) -> None:
    """Receive a file, whose first bytes are written last: without them it is none."""
    first = _exactly(connection, min(size, _FIRST))
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b") as f:
        f.write(bytes(len(first)))
        f.flush()
        os.posix_fallocate(f.fileno(), 0, max(size, 1))
        left, block = size - len(first), memoryview(bytearray(_BLOCK))
        while left:
            count = connection.recv_into(block, min(left, _BLOCK))
            if not count:
                raise ConnectionError("the other side has ended")
            f.write(block[:count])
            left -= count
        f.truncate()
        f.seek(0)
        f.write(first)


_FIRST = 64


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def _receive(connection: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ValueError("it is too long for a request")
    return json.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts, left = [], count
    while left:
        part = connection.recv(left)
        if not part:
            raise ConnectionError("the other side has ended")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
