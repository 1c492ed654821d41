"""Does a run train whose state is larger than the memory that it may take?"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.equivalence import limited_run

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT = int(0.8 * limited_run.STATE_BYTES)


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group (version 1) with a limit, which needs root."""
    own = GROUPS / f"jaxpar-{os.getpid()}"
    try:
        own.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    (own / "memory.limit_in_bytes").write_text(str(LIMIT))
    yield own
    own.rmdir()


def losses(where: str, folder: Path, group: Path | None = None) -> list[str]:
    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, "-m", limited_run.__name__, where, str(folder)],
        env=os.environ
        | {
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "JAX_PLATFORMS": "cpu",
        },
        preexec_fn=enter,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if line.startswith("loss")]


@pytest.mark.slow
def test_a_state_larger_than_the_limit_trains_as_in_memory(tmp_path, group) -> None:
    """3.2 GB of state with 2.6 GB of memory, to the bit."""
    found = losses("disk", tmp_path, group)
    assert len(found) == limited_run.STEPS
    assert found == losses("host", tmp_path)
    peak = int((group / "memory.max_usage_in_bytes").read_text())
    assert peak <= LIMIT < limited_run.STATE_BYTES
