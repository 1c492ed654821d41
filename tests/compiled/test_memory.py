"""Do temporaries stay within what a stage may hold, on GPUs that are not here?"""

import pytest

from tests.compiled.programs import Compiled, Run, compile_step
from tests.compiled.test_traffic import STEPS

# 403M parameters.
LARGE = Run(zero=2, layers=32, vocab=256, accumulate=2)


def check_stage_2_memory(step: Compiled, run: Run) -> None:
    """At most 3.3 bytes a parameter besides the layers' stashed inputs."""
    stashed = run.layers * run.length * run.width * 2
    assert step.program.memory.temporaries - stashed <= 3.3 * step.psi


def test_stage_2_holds_the_parameters_once_and_no_whole_gradients(compiled):
    step = compiled(compile_step, LARGE)
    assert step.psi == pytest.approx(403e6, rel=2e-3)
    check_stage_2_memory(step, LARGE)


@pytest.mark.slow
def test_a_replicated_accumulator_is_seen(compiled):
    run = Run(
        zero=2, layers=32, vocab=256, accumulate=2, fault="accumulator replicated"
    )
    step = compiled(compile_step, run)
    with pytest.raises(AssertionError):
        check_stage_2_memory(step, run)


@pytest.mark.slow
def test_stage_3_grows_by_the_stashed_inputs_not_by_the_model(compiled):
    short, long = STEPS["zero3-512"], Run(zero=3, hosts=64, layers=32)
    few, many = (compiled(compile_step, run) for run in (short, long))
    added = many.program.memory.temporaries - few.program.memory.temporaries
    layers = long.layers - short.layers
    stashed = layers * long.length * long.width * 2
    # A device's own piece of each parameter, and of its gradient, in bf16.
    pieces = (2 + 2) * (many.psi - few.psi) / many.num_devices
    assert 0 < added <= stashed + pieces
    assert pieces < stashed / 3


def test_stage_3_holds_three_layers_of_parameters(compiled):
    """The one that computes, the next one, and the gradients of the one before."""
    run = Run(zero=3, hosts=64, layers=32)
    step = compiled(compile_step, run)
    layer = 12 * run.width**2 * 2
    head = run.vocab * run.width * 2
    stashed = run.layers * run.length * run.width * 2
    # Logits, exponentials, targets compared and cotangent, at once at most.
    logits = run.length * run.vocab * 4
    assert step.program.memory.temporaries <= 3 * layer + stashed + head + 4 * logits
