"""Does a drawing of a schedule show what the table says, and last as long?"""

import itertools
import struct
import sys

import pytest
from hypothesis import given

from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.pipeline.schedules.table import cost
from jaxpar.show.schedule import boxes, draw
from tests.pipeline.schedules.test_chart import schedules, work_of

TIMES = {"forward": 1.0, "backward": 2.0, "weight": 0.5}


@given(schedules())
def test_boxes_last_as_long_as_the_cost_says(schedule):
    found = boxes(schedule, TIMES)
    whole = cost(schedule, **TIMES)
    assert max(box.begin + box.length for box in found) == pytest.approx(whole.total)
    busy = [0.0] * schedule.num_stages
    for box in found:
        busy[box.stage] += box.length
    assert max(busy) == pytest.approx((1 - whole.bubble) * whole.total)


@given(schedules())
def test_boxes_are_the_tables_work_and_overlap_on_no_stage(schedule):
    found = boxes(schedule, TIMES)
    work = [(b.stage, b.work, b.microbatch, b.chunk) for b in found]
    assert sorted(work) == sorted(item[1:] for item in work_of(schedule))
    for stage in range(schedule.num_stages):
        own = sorted((b.begin, b.begin + b.length) for b in found if b.stage == stage)
        for (_, end), (begin, _) in itertools.pairwise(own):
            assert begin >= end - 1e-9


def test_boxes_of_a_small_case_are_those_by_hand():
    found = boxes(make_schedule("1f1b", 2, 2), TIMES)
    assert [(b.stage, b.work[0], b.microbatch, b.begin, b.length) for b in found] == [
        (0, "f", 0, 0.0, 1.0),
        (0, "f", 1, 1.0, 1.0),
        (1, "f", 0, 1.0, 1.0),
        (1, "b", 0, 2.0, 2.0),
        (0, "b", 0, 4.0, 2.0),
        (1, "f", 1, 4.0, 1.0),
        (1, "b", 1, 5.0, 2.0),
        (0, "b", 1, 7.0, 2.0),
    ]


def png_size(file) -> tuple[int, int]:
    """Width and height in pixels, of the PNG's header."""
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content[-8:-4] == b"IEND"
    return struct.unpack(">II", content[16:24])


def test_drawing_is_wider_the_longer_the_schedule(tmp_path):
    sizes = []
    for M in (8, 16):
        draw(make_schedule("1f1b", 4, M), TIMES, tmp_path / "schedule.png")
        sizes.append(png_size(tmp_path / "schedule.png"))
    assert sizes[0][0] < sizes[1][0]
    assert sizes[0][1] == sizes[1][1]


def test_drawing_has_room_for_its_texts_and_is_the_same_each_time(
    tmp_path, monkeypatch
):
    schedule = make_schedule("interleaved:2", 10, 20)
    figures = []

    def keep(figure, *_):
        figure.draw_without_rendering()
        figures.append(figure)

    with monkeypatch.context() as patched:
        patched.setattr("jaxpar.show.schedule.save", keep)
        draw(schedule, TIMES, tmp_path / "schedule.png")
    (figure,), (axes,) = figures, figures[0].axes
    texts = [*axes.texts, *axes.get_xticklabels()[:-1], *axes.get_yticklabels()]
    texts += [axes.xaxis.label, figure._suptitle, *figure.legends[0].get_texts()]
    places = [text.get_window_extent() for text in texts]
    assert len(axes.texts) == len(work_of(schedule))
    assert all(figure.bbox.containsx(x) for p in places for x in (p.x0, p.x1))
    assert all(figure.bbox.containsy(y) for p in places for y in (p.y0, p.y1))
    places.sort(key=lambda place: place.x0)
    for at, one in enumerate(places):
        right = itertools.takewhile(lambda p, one=one: p.x0 < one.x1, places[at + 1 :])
        assert not any(one.overlaps(other) for other in right)
    for name in "ab":
        draw(make_schedule("1f1b", 2, 2), TIMES, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_missing_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = r"picture needs matplotlib, .*: pip install 'jaxpar\[plot\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        draw(make_schedule("1f1b", 1, 1), TIMES, tmp_path / "schedule.png")
    assert not list(tmp_path.iterdir())
