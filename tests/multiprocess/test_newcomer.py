"""Does a newcomer's first day end well, in a fresh clone of what is committed?"""

import subprocess
from pathlib import Path

import pytest

from tests.multiprocess.launching import ROOT
from tests.multiprocess.test_schedulers import slurm  # noqa: F401 - a fixture

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

LIMIT_SECONDS = 900


@pytest.mark.usefixtures("slurm")
def test_first_day_goes_as_the_documents_say(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "tests" / "newcomer.sh"), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "all of it works" in done.stdout
    assert "left out" not in done.stdout
