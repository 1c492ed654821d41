"""Is a step the same program in each process, where sets have other orders?"""

import json
import subprocess
import sys

import pytest

from tests.multiprocess.launching import ROOT, environment


@pytest.mark.thorough
def test_programs_do_not_depend_on_the_order_of_sets() -> None:
    """Else collectives of two processes wait for each other for ever.

    Norms of gradients that leave for the disk were added in the order of a set.
    """
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.traced_alike"],
            cwd=ROOT,
            env={**environment(), "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (json.loads(each.communicate()[0]) for each in started)
    assert "disk, gradients" in first
    assert len(first) > len({name.split(",")[0] for name in first}) >= 7
    assert first == second
