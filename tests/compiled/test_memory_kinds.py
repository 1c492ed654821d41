"""Are bytes in host memory counted apart in the programs of GPUs and TPUs?"""

import pytest

from tests.compiled.host_moments import DEVICES, WIDTH, plan_of

MOMENTS = 2 * 4 * WIDTH * WIDTH // DEVICES
BESIDE = 2048
"""The count of steps, and what a TPU pads it to."""


@pytest.mark.parametrize("target", ["h200:1x4", "v5e:2x2"])
def test_moments_on_the_host_take_none_of_the_device(target, compiled):
    (here, recorded), (there, budget) = (
        compiled(plan_of, target, on_host) for on_host in (False, True)
    )
    assert MOMENTS <= there.memory.host_state <= MOMENTS + BESIDE
    assert there.memory.optimizer == 0
    assert here.memory.host_state == 0
    assert here.memory.state - there.memory.state == here.memory.optimizer
    memory = there.program.memory
    assert memory.on_host == there.memory.host_state
    assert memory.peak <= memory.arguments + memory.outputs + memory.temporaries
    assert MOMENTS <= budget.host_state_bytes <= MOMENTS + BESIDE
    assert recorded.host_state_bytes == 0
    total = budget.state_bytes + budget.host_state_bytes
    assert total == recorded.state_bytes
