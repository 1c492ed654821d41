"""Is a step on CPU devices right with as many threads as a user has?

The other tests give XLA more threads. In XLA's default order the first step's loss is
NaN here (benchmarks/cpu_order.py).
"""

import dataclasses
import os

import pytest

from benchmarks.cpu_order import Config, in_process, is_close


@pytest.mark.thorough
def test_steps_at_zero_3_have_the_losses_of_one_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NPROC", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
        monkeypatch.delenv(name, raising=False)
    assert "NPROC" not in os.environ
    config = dataclasses.replace(Config(), steps=4)
    alone = in_process(config, 1, default=False)
    found = in_process(config, 2, default=False)
    assert alone is not None
    assert found is not None
    assert is_close(found["losses"], alone["losses"])
