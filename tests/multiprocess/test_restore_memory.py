"""Does a process that restores need memory for its shards, not for the model?"""

import json
import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxpar.checkpoint import Checkpoints
from tests.multiprocess.restore_worker import LEAF_BYTES, LEAVES, ROWS, WIDTH
from tests.multiprocess.test_training import ROOT, end, wait_for

PROCESSES = 2
READERS_BYTES = 100 << 20
"""Threads, caches and the arrays' metadata, whatever the model."""

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_two_processes_restore_half_of_the_model_each(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    tree = {f"w{i}": jnp.full((ROWS, WIDTH), i, jnp.float32) for i in range(LEAVES)}
    checkpoints.save(1, tree)
    checkpoints.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    spec = {
        "coordinator": coordinator,
        "count": PROCESSES,
        "devices": 1,
        "folder": str(tmp_path / "run"),
    }
    started = []
    try:
        for index in range(PROCESSES):
            text = json.dumps({**spec, "index": index})
            command = [sys.executable, "-m", "tests.multiprocess.restore_worker", text]
            with (tmp_path / f"{index}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        codes = wait_for(started)
    finally:
        for process in started:
            end(process)
    logs = [(tmp_path / f"{i}.log").read_text() for i in range(PROCESSES)]
    assert codes == [0] * PROCESSES, logs
    allowed = LEAVES * LEAF_BYTES / PROCESSES + LEAF_BYTES + READERS_BYTES
    assert allowed < 0.8 * LEAVES * LEAF_BYTES, "else nothing is told"
    for log in logs:
        taken = int(log.rsplit("taken", 1)[1])
        assert LEAVES * LEAF_BYTES / PROCESSES < taken < allowed
