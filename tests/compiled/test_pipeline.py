"""Does a pipeline hold and move what its schedule says, on GPUs that are not here?"""

import pytest

from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.pipeline.schedules.table import kept
from tests.compiled.pipelines import CompiledPipe, Pipe, compile_pipe

SCHEDULES = ("1f1b", "interleaved", "zero_bubble")


def largest(step: CompiledPipe, kind: str, *axes: str) -> list[tuple[int, int]]:
    """(count, bytes of each) of a kind of collective over exactly these axes."""
    return [
        (round(row.count), row.bytes // round(row.count))
        for row in step.program.collectives
        if row.kind == kind and set(row.axes) == set(axes)
    ]


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        *(pytest.param(name, "full", marks=pytest.mark.slow) for name in SCHEDULES),
        pytest.param("1f1b", "none", marks=pytest.mark.slow),
    ],
)
def test_temporaries_do_not_grow_with_the_microbatches(compiled, schedule, remat):
    few, many = (
        compiled(compile_pipe, Pipe(schedule=schedule, microbatches=m, remat=remat))
        for m in (8, 128)
    )
    temporaries = [step.program.memory.temporaries for step in (few, many)]
    assert temporaries[1] <= 1.03 * temporaries[0]


@pytest.mark.slow
def test_temporaries_of_gpipe_grow_by_every_microbatch(compiled):
    few, many = (
        compiled(compile_pipe, Pipe(schedule="gpipe", microbatches=m)) for m in (8, 128)
    )
    added = many.program.memory.temporaries - few.program.memory.temporaries
    assert added >= 120 * Pipe().activation_bytes


@pytest.mark.parametrize(
    "schedule",
    [
        "1f1b",
        *(pytest.param(s, marks=pytest.mark.slow) for s in (*SCHEDULES[1:], "gpipe")),
    ],
)
def test_rings_have_the_places_that_the_schedule_keeps(compiled, schedule):
    run = Pipe(schedule=schedule)
    step = compiled(compile_pipe, run)
    needs = kept(make_schedule(schedule, run.pipe, run.microbatches))
    buffers = {int(needs.inputs.max()), int(needs.cotangents.max())}
    assert set(step.buffers) == buffers
    split = {int(needs.products.max())} if schedule == "zero_bubble" else set()
    assert set(step.stashes) == split
    if schedule == "1f1b":
        assert needs.inputs.max() == 2 * run.pipe - 1


@pytest.mark.slow
def test_residuals_have_the_places_of_what_is_under_way(compiled):
    run = Pipe(remat="none")
    step = compiled(compile_pipe, run)
    needs = kept(make_schedule(run.schedule, run.pipe, run.microbatches))
    assert set(step.stashes) == {int(needs.inputs.max())}


def test_two_activations_a_tick_are_sent(compiled):
    run = Pipe()
    step = compiled(compile_pipe, run)
    ticks = run.microbatches + 2 * (run.pipe - 1)
    sent = step.program.communicated_bytes("collective-permute")
    assert sent == 2 * ticks * run.activation_bytes
    assert sent == step.program.communicated_bytes("collective-permute", "pipe")


def test_nothing_crosses_pipe_but_what_the_ends_need(compiled):
    """An all-reduce of one activation for each: the last stage's output, the first
    stage's cotangent (over pipe), the embedding's lookup and the head's cotangent (over
    the vocabulary's axes); then small sums of the loss; once a step, leaves that rest
    over pipe and are used whole."""
    run = Pipe()
    step = compiled(compile_pipe, run)
    ticks = run.microbatches + 2 * (run.pipe - 1)
    for axes in (("pipe",), ("pipe", "tensor")):
        large = [
            (count, size)
            for count, size in largest(step, "all-reduce", *axes)
            if size >= run.activation_bytes
        ]
        assert large == [(2 * ticks, run.activation_bytes)]
        small = [
            count * size
            for count, size in largest(step, "all-reduce", *axes)
            if size < run.activation_bytes
        ]
        assert sum(small) <= ticks * 4 * 4 * run.length
    ends = step.psi - step.psi_blocks - run.vocab * run.width
    assert step.program.communicated_bytes("all-gather", "pipe") <= 2 * ends
    for kind in ("reduce-scatter", "all-to-all"):
        assert step.program.communicated_bytes(kind, "pipe") == 0


@pytest.mark.parametrize("zero", [1, 3])
def test_gradients_cross_data_once_a_step_at_every_stage(compiled, zero):
    run = Pipe(zero=zero)
    step = compiled(compile_pipe, run)
    own = 2 * step.psi / (run.pipe * run.tensor)
    for kind in ("reduce-scatter", "all-gather"):
        assert step.program.communicated_bytes(kind, "data") == pytest.approx(
            own, rel=0.05
        )
        assert all(count <= 8 for count, _ in largest(step, kind, "data"))
    assert step.program.communicated_bytes("all-reduce", "data") < 0.01 * own


def test_interleaved_moves_blocks_once_a_step(compiled):
    """Each device's own piece, there and back in bf16."""
    run = Pipe(schedule="interleaved")
    step = compiled(compile_pipe, run)
    piece = step.psi_blocks / (run.data * run.pipe * run.tensor)
    moved = step.program.communicated_bytes("all-to-all", "pipe")
    assert moved == pytest.approx((2 + 2) * piece, rel=0.02)


@pytest.mark.slow
def test_175b_on_512_gpus_compiles_in_two_minutes(compiled):
    run = Pipe(
        data=8,
        pipe=16,
        tensor=4,
        layers=96,
        width=12_288,
        heads=96,
        length=2048,
        vocab=51_200,
        microbatches=32,
    )
    step = compiled(compile_pipe, run)
    assert step.psi == pytest.approx(175e9, rel=0.01)
    assert step.seconds <= 120
    assert step.host_bytes <= 12e9
    assert step.program.bytes_of("state") == pytest.approx(
        12 * step.psi / 512, rel=0.01
    )
    assert step.program.memory.peak <= 40e9
