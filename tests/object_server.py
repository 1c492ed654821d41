"""A server of this machine that speaks S3: moto, in a process of its own.

Its packages are in a folder beside the environment, ``s3``, by ``.ci/setup``: one of
them needs an older version of what the others have.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "s3"
BUCKET = "bucket"
_SECONDS = 60.0


class Server:
    """A running server, with an empty bucket."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"

    @property
    def environment(self) -> dict[str, str]:
        """By which a process finds it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
        }

    def ask(self, key: str, method: str = "GET", content: bytes | None = None) -> bytes:
        """A request, of the bucket or one of its objects."""
        path = key if key.startswith("?") else urllib.parse.quote(key)
        address = f"{self.url}/{BUCKET}{'/' if key else ''}{path}"
        signed = {"Authorization": "AWS nobody:nothing"}  # Checked by no one.
        request = urllib.request.Request(address, content, signed, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read()

    def keys(self, prefix: str = "") -> list[str]:
        """The names of its objects."""
        text = self.ask(f"?list-type=2&prefix={prefix}").decode()
        parts = text.split("<Key>")[1:]
        return [part.partition("</Key>")[0] for part in parts]


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A server, which this process finds, until the end of the block."""
    if not (FOLDER / "moto").is_dir():
        pytest.skip(
            f"no S3 server in {FOLDER.name}/ beside the environment: make setup"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    server = Server(port)
    try:
        until = time.monotonic() + _SECONDS
        while True:
            try:
                server.ask("", "PUT")
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert process.poll() is None, "the server has ended"
                assert time.monotonic() < until, "the server does not answer"
                time.sleep(0.1)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            yield server
    finally:
        process.kill()
        process.wait()
