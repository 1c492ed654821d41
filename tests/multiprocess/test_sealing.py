"""Does each process of a run hash its share of a checkpoint's files?"""

from pathlib import Path

import pytest

from jaxpar.checkpoint.folder import complete_steps, step_path, verified
from tests.multiprocess.sealing_worker import ROWS, WIDTH
from tests.multiprocess.test_training import launch
from tests.multiprocess.worker import Case

pytestmark = [pytest.mark.multiprocess, pytest.mark.thorough]
WORKER = "tests.multiprocess.sealing_worker"


def test_two_processes_hash_a_half_each_and_fail_together(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (first,), (second,) = launch(
        [Case(data=4, tensor=1, zero=0, save=str(folder))], tmp_path, WORKER
    )
    assert list(complete_steps(folder)) == [1], "nothing is left of the second save"
    assert [path.name for path in folder.iterdir()] == ["step_00000001"]
    manifest = verified(step_path(folder, 1), 1)
    assert manifest.num_bytes > 4 * ROWS * WIDTH
    assert set(first["sizes"]).isdisjoint(second["sizes"])
    found = first["sizes"] | second["sizes"]
    assert found == {name: size for name, (size, _) in manifest.files.items()}
    for seen in (first, second):
        assert sum(seen["sizes"].values()) > 0.49 * manifest.num_bytes
        assert seen["is_same"]
        assert "process 1: OSError(5, 'Input/output error')" in seen["said"]
        assert "process 0" not in seen["said"]
        assert "newest checkpoint there is step 1" in seen["said"]
