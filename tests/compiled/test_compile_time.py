"""Does the time to compile stay flat in depth and in devices?

Processor time of the compiling process: another test beside it takes none of that.
"""

import pytest

from tests.compiled.programs import Run, compile_step

MARGIN = 1.3


@pytest.mark.slow
def test_48_layers_take_little_longer_than_12(compiled):
    compiled(compile_step, Run())  # The first of a process pays for what it loads.
    few, many = (
        compiled(compile_step, Run(zero=3, layers=layers, width=512))
        for layers in (12, 48)
    )
    assert many.seconds <= MARGIN * few.seconds


@pytest.mark.slow
def test_4096_devices_take_as_long_as_8(compiled):
    compiled(compile_step, Run())
    few, many = (
        compiled(compile_step, Run(zero=1, hosts=hosts, width=4096, length=64))
        for hosts in (1, 512)
    )
    assert many.num_devices == 4096
    assert many.seconds <= MARGIN * few.seconds
