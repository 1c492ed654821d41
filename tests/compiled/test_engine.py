"""What does an engine do whose devices are only to compile for?"""

from pathlib import Path

import pytest

from tests.compiled.programs import calls_refused


@pytest.fixture(scope="module")
def said(compiled):
    return compiled(calls_refused)


def test_it_explains_its_step(said):
    assert "mesh data 8 x pipe 1 x tensor 1" in said["explain"]
    assert "all-reduce" in said["explain"]
    assert "xla_gpu_reduce_scatter_combine_threshold_bytes=4194304" in said["explain"]


@pytest.mark.parametrize("call", ["step", "evaluate", "save", "restore", "model"])
def test_it_says_why_it_does_not_run(said, call):
    assert "mesh has 8 compile-only NVIDIA H200" in said[call]
    assert "explain()" in said[call]
    assert not Path("never-made").exists()
