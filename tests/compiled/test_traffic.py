"""Do traffic and state meet the closed form, at 64 and 512 GPUs that are not here?

Psi parameters in bf16: a gather or a reduce-scatter of all of them is 2 Psi bytes (of
each tensor shard); AdamW's state with fp32 masters is 12 Psi bytes at stage 0, and
12 Psi / N above. Read from programs that XLA compiled for H200s.
"""

import pytest

from tests.compiled.programs import Compiled, Run, compile_step

STEPS = {
    "zero0-64": Run(zero=0),
    "zero1-64": Run(zero=1),
    "zero2-64": Run(zero=2),
    "zero3-64": Run(zero=3),
    "zero1-512": Run(zero=1, hosts=64),
    "zero2-512": Run(zero=2, hosts=64),
    "zero3-512": Run(zero=3, hosts=64),
    "zero1-64-tensor8": Run(zero=1, tensor=8, remat="none"),
}
GATHERS = {0: 0, 1: 1, 2: 1, 3: 2}


def check_data_traffic(step: Compiled, run: Run, unneeded: int = 0) -> None:
    """Raise AssertionError where something else crosses data than the stage says.

    Of the parameters, `unneeded` are not gathered again, for the backward pass has no
    use for them.
    """
    program = step.program
    whole = 2 * step.psi / run.tensor
    gathered = program.communicated_bytes("all-gather", "data")
    assert gathered == pytest.approx(GATHERS[run.zero] * whole - 2 * unneeded, 2e-2)
    scattered = program.communicated_bytes("reduce-scatter", "data")
    assert scattered == pytest.approx(whole if run.zero else 0, 2e-2)
    for row in program.collectives:
        assert row.kind in ("all-gather", "all-reduce", "reduce-scatter"), row
        if row.kind == "all-reduce" and "data" in row.axes and run.zero:
            assert row.bytes < 1e6, row
        if row.axes == ("data",) and row.bytes > 1e6:
            assert row.dtype == "bf16", row
    assert program.unknown_loops == ()


LONG = ("zero1-512", "zero2-512", "zero3-512", "zero1-64-tensor8")
NAMED = [
    pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in STEPS
]


@pytest.fixture(scope="module", params=NAMED)
def named(request, compiled):
    run = STEPS[request.param]
    return run, compiled(compile_step, run)


def test_each_stage_moves_what_its_row_of_the_table_says(named):
    run, step = named
    # The loss makes the head's gradients in the forward pass.
    head = run.vocab * run.width if run.zero == 3 else 0
    check_data_traffic(step, run, unneeded=head)


def test_state_takes_12_bytes_a_parameter_over_all_devices(named):
    run, step = named
    ways = run.tensor if run.zero == 0 else step.num_devices
    assert step.program.bytes_of("state") == pytest.approx(12 * step.psi / ways, 1e-3)


def test_state_is_updated_in_place(named):
    """But for a few small leaves: 2.5 MB is the least state of these steps."""
    _, step = named
    assert step.copied < 1e5


@pytest.mark.slow
def test_gradients_left_as_they_were_scattered_are_seen(compiled):
    step = compiled(compile_step, Run(zero=1, fault="left as scattered"))
    assert step.copied > 11 * step.psi / step.num_devices


@pytest.mark.slow
def test_state_of_gpt2_with_its_odd_vocabulary(compiled):
    gpt2 = Run(zero=1, layers=12, width=768, vocab=50_257, length=1024)
    step = compiled(compile_step, gpt2)
    assert step.psi == pytest.approx(124.4e6, rel=2e-3)
    assert step.num_devices == 64
    assert step.program.bytes_of("state") == pytest.approx(12 * step.psi / 64, 2e-2)
    assert step.program.bytes_of("batch") == 1025 * 4


def test_stage_0_reduces_everything_once(compiled):
    step = compiled(compile_step, STEPS["zero0-64"])
    assert step.program.communicated_bytes("all-reduce", "data") == pytest.approx(
        2 * step.psi, 2e-2
    )


@pytest.mark.slow
def test_stage_1_crosses_as_often_with_8_micro_batches_as_with_1(compiled):
    once = compiled(compile_step, STEPS["zero1-64"]).program
    often = compiled(compile_step, Run(zero=1, accumulate=8)).program
    for kind in ("all-gather", "reduce-scatter"):
        assert (
            often.communicated_bytes(kind, "data")
            == once.communicated_bytes(kind, "data")
            > 0
        )


def test_a_users_unscanned_model_at_stage_3_gathers_twice_and_scatters_once(compiled):
    run = Run(zero=3, users_model=True)
    # No gradient is taken of the batch, which the first kernel's would be for.
    check_data_traffic(compiled(compile_step, run), run, unneeded=run.width**2)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_frozen_base_is_gathered_in_bf16_and_has_no_gradient(zero, compiled):
    """Of each layer the backward pass needs the base; the first kernels, of the base
    and the adapter, only the forward pass."""
    run = Run(zero=zero, users_model=True, rank=16)
    step = compiled(compile_step, run)
    gathered = step.program.communicated_bytes("all-gather", "data")
    unneeded = run.width**2 + run.width * run.rank if zero == 3 else 0
    weights = step.psi + step.frozen
    right = GATHERS[zero] * 2 * weights - 2 * unneeded
    assert gathered == pytest.approx(right, 2e-2)
    scattered = step.program.communicated_bytes("reduce-scatter", "data")
    assert scattered == pytest.approx(2 * step.psi, 2e-2)
    summed = step.program.communicated_bytes("all-reduce", "data")
    assert summed < 1e-2 * 2 * step.psi
    stored = (12 * step.psi + 2 * step.frozen) / step.num_devices
    assert step.program.bytes_of("state") == pytest.approx(stored, 1e-3)


def check_tensor_all_reduces(step: Compiled, run: Run) -> None:
    """Two a layer and direction, and one each for the embedding and the head."""
    activation = run.length * run.width * 2
    communicated = step.program.communicated_bytes
    assert communicated("all-reduce", "tensor") == pytest.approx(
        (4 * run.layers + 2) * activation, 2e-2
    )
    # What has no rule rests over tensor and is used whole: the positions, and six
    # vectors a layer.
    whole = 2 * run.width * (run.length + 6 * run.layers + 2)
    # Of each token's logits, three fp32 numbers of each device's vocabulary.
    whole += 4 * 3 * run.length * run.tensor
    assert communicated("all-gather", "tensor") == pytest.approx(whole, 2e-2)


def test_tensor_parallel_all_reduces_twice_a_layer_and_direction(compiled):
    run = STEPS["zero1-64-tensor8"]
    check_tensor_all_reduces(compiled(compile_step, run), run)


@pytest.mark.slow
def test_sequence_parallel_scatters_and_gathers_instead(compiled):
    run = Run(zero=1, tensor=8, remat="none", sequence_parallel=True)
    step = compiled(compile_step, run)
    check_data_traffic(step, run)
    activation = run.length * run.width * 2
    communicated = step.program.communicated_bytes
    scattered = communicated("reduce-scatter", "tensor")
    assert scattered == pytest.approx((4 * run.layers + 1) * activation, 2e-2)
    # Twice a layer and direction, and twice more for the backward pass, which gathers
    # the inputs of the products again instead of keeping them whole.
    gathered = communicated("all-gather", "tensor")
    assert gathered <= (6 * run.layers + 4) * activation
    assert communicated("all-reduce", "tensor") <= 2.2 * activation


@pytest.mark.slow
def test_a_constraint_dropped_is_seen(compiled):
    run = Run(zero=1, tensor=8, remat="none", fault="constraint dropped")
    step = compiled(compile_step, run)
    with pytest.raises(AssertionError):
        check_tensor_all_reduces(step, run)


@pytest.mark.slow
def test_a_cast_after_the_gather_is_seen(compiled):
    run = Run(zero=1, fault="cast after the gather")
    step = compiled(compile_step, run)
    with pytest.raises(AssertionError):
        check_data_traffic(step, run)
