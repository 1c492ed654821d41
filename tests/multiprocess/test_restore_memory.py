"""Does a process that restores need memory for its shards, not for the model?"""

from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxpar.checkpoint import Checkpoints
from tests.multiprocess import restore_script
from tests.multiprocess.launching import Launched, command
from tests.multiprocess.restore_script import LEAF_BYTES, LEAVES, ROWS, WIDTH

PROCESSES = 2
READERS_BYTES = 100 << 20
"""Threads, caches and the arrays' metadata, whatever the model."""

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_two_processes_restore_half_of_the_model_each(tmp_path: Path) -> None:
    out = tmp_path / "run"
    checkpoints = Checkpoints(out)
    tree = {f"w{i}": jnp.full((ROWS, WIDTH), i, jnp.float32) for i in range(LEAVES)}
    checkpoints.save(1, tree)
    checkpoints.close()
    of_launch = (f"--processes={PROCESSES}",)
    script = Path(restore_script.__file__)
    args = command(out, of_launch=of_launch, script=script)
    with Launched(out, args) as launched:
        assert launched.code() == 0, launched.output()
    allowed = LEAVES * LEAF_BYTES / PROCESSES + LEAF_BYTES + READERS_BYTES
    assert allowed < 0.8 * LEAVES * LEAF_BYTES, "else nothing is told"
    for index in range(PROCESSES):
        taken = int((out / f"taken-{index}").read_text())
        assert LEAVES * LEAF_BYTES / PROCESSES < taken < allowed
