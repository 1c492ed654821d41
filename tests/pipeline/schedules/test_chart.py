"""Does a chart show what the table says, in any width?"""

from hypothesis import given
from hypothesis import strategies as st

from jaxpar.pipeline.schedules.asynchronous import make_steady
from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.pipeline.schedules.chart import chart, title
from jaxpar.pipeline.schedules.table import IDLE

NAMES = ("gpipe", "1f1b", "interleaved:1", "interleaved:3", "zero_bubble")
LETTERS = {"F": "forward", "B": "backward", "W": "weight"}


@st.composite
def schedules(draw):
    P = draw(st.integers(1, 5))
    M = P * draw(st.integers(1, 4))
    return make_schedule(draw(st.sampled_from(NAMES)), P, M)


def work_of(schedule) -> list[tuple]:
    """(tick, stage, work, micro-batch, chunk) of the tables."""
    tables = {
        "forward": schedule.forward[:, :, None],
        "backward": schedule.backward[:, :, None],
        "weight": schedule.weight,
    }
    return sorted(
        (tick, stage, work, *map(int, slot))
        for work, table in tables.items()
        for tick, row in enumerate(table)
        for stage, slots in enumerate(row)
        for slot in slots
        if slot[0] != IDLE
    )


def read_chart(text, num_chunks) -> list[tuple]:
    """Read a chart back, band by band."""
    found, ticks, stage = [], [], -1
    for line in text.splitlines():
        words = line.split()
        if not words:
            continue
        if words[0] == "tick":
            ticks = [int(word) for word in words[1:]]
            continue
        if words[0] == "stage":
            stage, words = int(words[1]), words[2:]
        work, cells = LETTERS[words[0]], words[1:]
        for tick, cell in zip(ticks, cells, strict=True):
            if cell != ".":
                m, _, chunk = cell.partition(".")
                assert bool(chunk) == (num_chunks > 1)
                found.append((tick, stage, work, int(m), int(chunk or 0)))
    return sorted(found)


@given(schedules(), st.sampled_from((1, 20, 40, 80, 1000)))
def test_chart_reads_back_as_the_table_in_any_width(schedule, width):
    text = chart(schedule, width).plain
    assert read_chart(text, schedule.num_chunks) == work_of(schedule)
    cell = 6
    assert max(map(len, text.splitlines())) <= max(width, len("stage 0 F ") + cell)
    bands = sum(line.startswith("tick") for line in text.splitlines())
    assert (bands == 1) == (schedule.num_ticks <= bands_of(text))


def bands_of(text) -> int:
    """Ticks in the first band."""
    return len(text.splitlines()[0].split()) - 1


def test_chart_colours_each_kind_of_work():
    text = chart(make_schedule("zero_bubble", 2, 4), 80)
    styles = {span.style for span in text.spans}
    assert len(styles - {"dim"}) == 3


def test_title_names_chunks_where_there_are_several():
    assert title(make_schedule("gpipe", 3, 4)) == "gpipe: 3 stages, 4 micro-batches"
    several = title(make_schedule("interleaved:4", 2, 6))
    assert several == "interleaved: 2 stages of 4 chunks, 6 micro-batches"


def test_numbers_of_several_batches_are_apart():
    text = str(chart(make_steady("steady", 4, 8), 80))
    assert "6  7  8  9 10 11 12 13" in text
