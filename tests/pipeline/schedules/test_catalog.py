"""Do names make the schedules they name, and do wrong ones say what is right?"""

import dataclasses

import numpy as np
import pytest

from jaxpar.pipeline.schedules.catalog import DEFAULT_CHUNKS, SCHEDULES, make_schedule
from jaxpar.pipeline.schedules.gpipe import make_gpipe
from jaxpar.pipeline.schedules.interleaved import make_1f1b
from jaxpar.pipeline.schedules.table import IDLE, check_schedule


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_name_makes_a_sound_schedule_of_that_name(name):
    schedule = make_schedule(name, 4, 8)
    check_schedule(schedule)
    assert schedule.name == name
    assert (schedule.num_stages, schedule.num_microbatches) == (4, 8)
    assert schedule.num_chunks == (DEFAULT_CHUNKS if name == "interleaved" else 1)
    assert schedule.splits_backward == (name == "zero_bubble")


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
            r"'zero_bubble'\. Did you mean '1f1b'\?",
        ),
        ("interleave:4", r"schedule='interleave:4' .* Did you mean 'interleaved'\?"),
        ("", r"schedule='' must be one of .*'zero_bubble'\.$"),
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
