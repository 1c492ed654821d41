"""Do files of memory reach another host, and nobody else?"""

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpar.checkpoint.memory_server import MemoryServer

NAME = "process-0.1"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[MemoryServer]]:
    made = []
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        made.append(MemoryServer(tmp_path / str(i), "127.0.0.1", "token"))
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 5 << 20])
def test_file_is_given_and_taken(
    hosts: list[MemoryServer], tmp_path: Path, size: int
) -> None:
    content = os.urandom(size)
    (tmp_path / "0" / NAME).write_bytes(content)
    hosts[0].put(hosts[1].address, NAME)
    assert (tmp_path / "1" / NAME).read_bytes() == content
    (tmp_path / "0" / NAME).unlink()
    hosts[0].get(hosts[1].address, NAME)
    assert (tmp_path / "0" / NAME).read_bytes() == content


def test_shorter_file_replaces_a_longer_one(
    hosts: list[MemoryServer], tmp_path: Path
) -> None:
    (tmp_path / "1" / NAME).write_bytes(bytes(1000))
    (tmp_path / "0" / NAME).write_bytes(b"x" * 100)
    hosts[0].put(hosts[1].address, NAME)
    assert (tmp_path / "1" / NAME).read_bytes() == b"x" * 100


def test_file_that_is_not_there_is_an_error(hosts: list[MemoryServer]) -> None:
    with pytest.raises(OSError, match=r"127\.0\.0\.1 has no 'process-3\.0' in memory"):
        hosts[0].get(hosts[1].address, "process-3.0")


def test_host_without_room_says_so(
    hosts: list[MemoryServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "0" / NAME).write_bytes(bytes(100))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"has no room for 'process-0\.1'"):
        hosts[0].put(hosts[1].address, NAME)


def ask(server: MemoryServer, content: bytes) -> bytes:
    """What comes back for some bytes."""
    with socket.create_connection(server.address, 5) as connection:
        found = b""
        with contextlib.suppress(OSError):  # It may close at once.
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                found += part
        return found


def request(**fields: object) -> bytes:
    known = {"token": "token", "what": "get", "name": NAME, "size": 0}
    text = json.dumps(known | fields).encode()
    return struct.pack("<I", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        request(token="other"),
        request(token=""),
        request(token=None),
        request(name="../secret"),
        request(name="/etc/passwd"),
        request(name="process-0.1\n"),
        request(name=7),
        struct.pack("<I", 3) + b"abc",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 1 << 31),
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
)
def test_strangers_get_nothing_and_harm_nobody(
    hosts: list[MemoryServer], tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "0" / NAME).write_bytes(b"secret")
    (tmp_path / "secret").write_bytes(b"secret")
    assert ask(hosts[0], content) == b""
    assert ask(hosts[0], request()).endswith(b"secret"), "it still serves its own"


def test_strangers_write_nothing(hosts: list[MemoryServer], tmp_path: Path) -> None:
    ask(hosts[0], request(token="other", what="put", size=3) + b"abc")
    assert list((tmp_path / "0").iterdir()) == []


def test_file_whose_sender_was_killed_holds_nothing(
    hosts: list[MemoryServer], tmp_path: Path
) -> None:
    """Its first bytes, which make it one, are written last."""
    (tmp_path / "0" / NAME).write_bytes(b"y" * 200)
    ask(hosts[0], request(what="put", size=200) + b"x" * 150)
    until = time.monotonic() + 5
    while (tmp_path / "0" / NAME).read_bytes()[:64] != bytes(64):
        assert time.monotonic() < until
