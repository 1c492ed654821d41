"""Do names make the schedules they name, and do wrong ones say what is right?"""

import dataclasses

import numpy as np
import pytest

from jaxpar.pipeline.schedules.asynchronous import PipeDream2BW, PipeMare
from jaxpar.pipeline.schedules.catalog import (
    DEFAULT_CHUNKS,
    SCHEDULES,
    asynchronous,
    chunks_of,
    make_schedule,
    with_chunks,
)
from jaxpar.pipeline.schedules.gpipe import make_gpipe
from jaxpar.pipeline.schedules.interleaved import make_1f1b, make_in_groups
from jaxpar.pipeline.schedules.table import IDLE, check_schedule


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_name_makes_a_sound_schedule_of_that_name(name):
    schedule = make_schedule(name, 4, 8)
    check_schedule(schedule)
    assert schedule.name == name
    assert (schedule.num_stages, schedule.num_microbatches) == (4, 8)
    assert schedule.num_chunks == (DEFAULT_CHUNKS if name == "interleaved" else 1)
    assert schedule.splits_backward == (name == "zero_bubble")


@pytest.mark.parametrize("name", [*SCHEDULES, "interleaved:3"])
@pytest.mark.parametrize(("P", "M"), [(2, 2), (2, 6), (3, 9), (4, 4), (4, 16)])
def test_forwards_of_a_chunk_are_in_the_order_of_the_micro_batches(name, P, M):
    """So mutable state changes as on one device."""
    ticks = check_schedule(make_schedule(name, P, M)).forward
    assert np.all(np.diff(ticks, axis=0) > 0)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 3), ("gpipe", 2)])
def test_forwards_of_sections_are_in_the_order_of_the_micro_batches(name, chunks):
    ticks = check_schedule(with_chunks(name, 2, 5, chunks)).forward
    assert np.all(np.diff(ticks, axis=0) > 0)


def test_names_are_these():
    assert set(SCHEDULES) == {"gpipe", "1f1b", "interleaved", "zero_bubble"}


@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_chunks_follow_the_name_of_interleaved(chunks):
    assert make_schedule(f"interleaved:{chunks}", 2, 4).num_chunks == chunks


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            "1f1c",
            r"schedule='1f1c' must be one of 'gpipe', '1f1b', 'interleaved', "
            r"'zero_bubble', 'pipedream_2bw', 'pipemare'\. Did you mean '1f1b'\?",
        ),
        ("interleave:4", r"schedule='interleave:4' .* Did you mean 'interleaved'\?"),
        ("", r"schedule='' must be one of .*'zero_bubble', .*'pipemare'\.$"),
        (
            "gpipe:2",
            r"schedule='gpipe:2': only 'interleaved' has chunks; use 'gpipe', or "
            r"'interleaved:2'\.",
        ),
        (
            "interleaved:0",
            r"schedule='interleaved:0': '0' must be a number of chunks a stage, as in "
            r"'interleaved:4'\.",
        ),
        ("interleaved:-1", r"'-1' must be a number of chunks"),
        ("interleaved:two", r"'two' must be a number of chunks"),
        ("pipemare:soon", r"'soon' must be a number of steps without delay"),
        ("interleaved", r"accumulate=7: schedule='interleaved' takes .* pipe=4; "),
    ],
)
def test_wrong_schedule_says_what_is_right(schedule, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(schedule, 4, 7)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved:3", make_1f1b(1, 1)])
@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 4), r"num_stages=0 must be at least 1\."),
        ((-2, 0), r"num_stages=-2 must be at least 1\."),
        ((4, 0), r"num_microbatches=0 must be at least 1\."),
    ],
)
def test_no_stages_and_no_microbatches_are_refused(schedule, numbers, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(schedule, *numbers)


def test_own_schedule_is_taken_as_it_is():
    own = dataclasses.replace(make_gpipe(2, 3), name="own")
    assert make_schedule(own, 2, 3) is own


@pytest.mark.parametrize(("P", "M"), [(3, 3), (2, 4)])
def test_own_schedule_made_for_others_is_refused(P, M):
    message = (
        r"schedule='gpipe' is made for 2 stages and 3 micro-batches, but "
        rf"pipe={P} and accumulate={M}; make it for these\."
    )
    with pytest.raises(ValueError, match=message):
        make_schedule(make_gpipe(2, 3), P, M)


def test_own_schedule_that_is_not_sound_is_refused():
    own = make_gpipe(2, 3)
    idle = np.full_like(own.backward, IDLE)
    own = dataclasses.replace(own, name="own", backward=idle)
    message = r"schedule='own': micro-batch 0 has no backward on stage 0, chunk 0"
    with pytest.raises(ValueError, match=message):
        make_schedule(own, 2, 3)


@pytest.mark.parametrize("num_sections", [1, 2, 3])
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("1f1b", 1),
        ("gpipe", 1),
        ("zero_bubble", 1),
        ("interleaved", DEFAULT_CHUNKS),
        ("interleaved:3", 3),
    ],
)
def test_name_gives_every_section_as_many_chunks_as_it_has(
    schedule, chunks, num_sections
):
    assert chunks_of(schedule, num_sections) == chunks


def test_chunks_of_own_schedule_are_shared_by_the_sections():
    own = make_in_groups("own", 2, 4, 6)
    assert [chunks_of(own, sections) for sections in (1, 2, 3, 6)] == [6, 3, 2, 1]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            make_1f1b(2, 4),
            r"schedule='1f1b': its num_chunks=1 must be a multiple of the model's 4 ",
        ),
        (make_in_groups("own", 2, 4, 6), r"schedule='own': its num_chunks=6 must be a"),
        (make_in_groups("own", 2, 4, 2), r"num_chunks=2 .* 4 sections, each of which"),
    ],
)
def test_own_schedule_whose_chunks_sections_can_not_share_is_refused(own, message):
    with pytest.raises(ValueError, match=message):
        chunks_of(own, 4)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "interleaved:3"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
def test_named_schedule_is_made_with_the_chunks_of_the_sections(schedule, chunks):
    found = with_chunks(schedule, 2, 4, chunks)
    check_schedule(found)
    numbers = found.num_stages, found.num_microbatches, found.num_chunks
    assert numbers == (2, 4, chunks)
    assert found.name == schedule.split(":")[0]
    assert not found.splits_backward
    times = check_schedule(found)
    is_gpipe = times.forward.max() < times.backward.min()
    assert is_gpipe == (schedule == "gpipe")


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 3), ("gpipe", 2)])
def test_sections_take_any_number_of_micro_batches(schedule, chunks):
    """Of seven on four stages the last group of "1f1b" is not full."""
    found = with_chunks(schedule, 4, 7, chunks)
    check_schedule(found)
    assert found.num_microbatches == 7


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_that_has_as_many_chunks_is_the_named_one(schedule):
    right = make_schedule(schedule, 2, 4)
    found = with_chunks(schedule, 2, 4, right.num_chunks)
    assert np.array_equal(found.forward, right.forward)
    assert np.array_equal(found.backward, right.backward)
    assert np.array_equal(found.weight, right.weight)


def test_own_schedule_that_has_as_many_chunks_is_taken_as_it_is():
    own = make_in_groups("own", 2, 4, 3)
    assert with_chunks(own, 2, 4, 3) is own


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            "zero_bubble",
            r"schedule='zero_bubble': it has num_chunks=1, but the model's sections "
            r"have 2 chunks on a stage; use '1f1b' or 'gpipe'\.",
        ),
        (
            make_in_groups("own", 2, 4, 3),
            r"schedule='own': it has num_chunks=3, .* 2 c",
        ),
        (make_schedule("zero_bubble", 2, 4), r"schedule='zero_bubble': it has num_chu"),
        ("1f1c", r"schedule='1f1c' must be one of"),
    ],
)
def test_schedule_that_can_not_have_the_chunks_of_the_sections_is_refused(
    schedule, message
):
    with pytest.raises(ValueError, match=message):
        with_chunks(schedule, 2, 4, 2)


def test_interleaved_refuses_a_group_that_is_not_full_for_sections_too():
    with pytest.raises(ValueError, match=r"accumulate=7: schedule='interleaved' takes"):
        with_chunks("interleaved", 4, 7, 5)


def test_own_table_is_never_replaced_by_another_of_its_name():
    with pytest.raises(ValueError, match=r"schedule='gpipe': it has num_chunks=4, but"):
        with_chunks(make_gpipe(2, 4, 4), 2, 4, 3)
    own = make_gpipe(2, 4, 3)
    assert with_chunks(own, 2, 4, 3) is own


def test_number_after_an_asynchronous_name_is_of_steps_without_delay():
    assert asynchronous("pipemare:200") == PipeMare(synchronous_steps=200)
    assert asynchronous("pipedream_2bw") == PipeDream2BW()
    assert asynchronous(PipeMare(decay=0.5)) == PipeMare(decay=0.5)
    assert asynchronous("1f1b") is None
