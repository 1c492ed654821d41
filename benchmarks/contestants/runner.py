"""How is a contestant run: as a process of its own, asked for steps over a pipe."""

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
_LAST_WORDS = 20
"""Lines: jax puts its own below what was wrong."""


class Contestant:
    """A process that takes steps when asked.

    Args:
      commands: one command a worker; the first is asked.
      environment: variables to add.
    """

    def __init__(
        self, commands: list[list[str]], environment: Mapping[str, str] | None = None
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        # A file, for nobody empties a pipe while steps are taken; full, it would block.
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.workers = []
        for rank, command in enumerate(commands):
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(commands)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            self.workers.append(
                subprocess.Popen(
                    command,
                    env=os.environ | own | dict(environment or {}),
                    stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=self.errors if rank == 0 else subprocess.DEVNULL,
                    text=True,
                )
            )

    def read(self) -> dict:
        """The next answer; raises RuntimeError with its last words if it has ended."""
        first = self.workers[0]
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("@@"):
                return json.loads(line[2:])
        first.wait()
        self.errors.seek(0)
        last = self.errors.read().strip().splitlines()[-_LAST_WORDS:]
        raise RuntimeError("\n".join(last))

    def take(self, warm: int, timed: int) -> dict:
        """Ask for steps, the first of them not timed, and wait for them."""
        self.ask(f"{warm} {timed}")
        return self.read()

    def ask(self, line: str) -> None:
        """Ask something, and don't wait; `read` has the answer."""
        asked = self.workers[0].stdin
        assert asked is not None
        asked.write(line + "\n")
        asked.flush()

    def stop(self) -> None:
        """End all workers."""
        for worker in self.workers:
            with worker:  # Closes its pipes, and waits.
                worker.kill()
        self.errors.close()
