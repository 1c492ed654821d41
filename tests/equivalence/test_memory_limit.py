"""Does a run train whose state or parameters are larger than its memory may be?"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.equivalence import limited_layers, limited_run

GROUPS = Path("/sys/fs/cgroup/memory")
LIMITS = {
    limited_run: int(0.8 * limited_run.STATE_BYTES),
    limited_layers: int(limited_layers.PARAM_BYTES / 1.5),
}


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group (version 1), which needs root."""
    own = GROUPS / f"jaxpar-{os.getpid()}"
    try:
        own.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield own
    own.rmdir()


def losses(
    program: ModuleType, where: str, folder: Path, group: Path | None = None
) -> list[str]:
    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, "-m", program.__name__, where, str(folder)],
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
@pytest.mark.parametrize("program", LIMITS, ids=lambda program: program.__name__)
def test_what_is_larger_than_the_limit_trains_as_in_memory(program, tmp_path, group):
    """To the bit.

    3.2 GB of state with 2.6 GB of memory; 2.7 GB of parameters, with 8.1 GB of state,
    with 1.8 GB.
    """
    limit = LIMITS[program]
    (group / "memory.limit_in_bytes").write_text(str(limit))
    found = losses(program, "disk", tmp_path, group)
    assert len(found) == program.STEPS
    assert found == losses(program, "host", tmp_path)
    peak = int((group / "memory.max_usage_in_bytes").read_text())
    assert peak <= limit
