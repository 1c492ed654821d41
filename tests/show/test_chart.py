"""Does a chart draw its numbers where they belong, and say them to everyone?"""

import re

import numpy as np

from jaxpar.show.chart import Chart, Line, Mark, Series, draw_chart
from tests.show.pages import HOSTILE, Page

NAN = float("nan")


def line(*values, label="train", **options):
    return Line(
        label, Series(np.arange(1.0, len(values) + 1), np.array(values)), **options
    )


def drawn(*lines, span=(1, 4), **options):
    return draw_chart(Chart("Loss", lines, **options), span)


def data_of(text, name):
    return [v.split() for _, n, v in Page(text).attributes if n == f"data-{name}"]


def test_points_carry_their_steps_and_values():
    text = drawn(line(4.0, 3.5, 3.0, 2.941925))
    assert data_of(text, "x") == [["1", "2", "3", "4"]]
    assert data_of(text, "y") == [["4", "3.5", "3", "2.9419"]]


def test_curve_goes_from_the_left_above_to_the_right_below():
    text = drawn(line(4.0, 3.0, 2.0, 1.0))
    (path,) = re.findall(r'class="first line" d="([^"]*)"', text)
    places = [tuple(map(int, p.split())) for p in re.findall(r"\d+ \d+", path)]
    across, down = zip(*places, strict=True)
    assert (across[0], across[-1]) == (0, 2000)
    assert list(down) == sorted(down)
    assert 0 < down[0] < 100
    assert 900 < down[-1] < 1000


def test_curve_is_broken_where_it_is_not_finite_and_a_point_alone_is_seen():
    text = drawn(line(4.0, NAN, 3.0, 2.0))
    (path,) = re.findall(r'class="first line" d="([^"]*)"', text)
    assert re.fullmatch(r"M0 \d+h0M1333 \d+L2000 \d+", path)
    assert data_of(text, "x") == [["1", "3", "4"]]


def test_line_without_finite_values_is_left_out():
    text = drawn(line(1.0, 2.0), line(NAN, NAN, label="other"))
    assert len(data_of(text, "x")) == 1
    assert "other" in "".join(Page(text).text("span"))


def test_spike_above_the_chart_is_reported():
    text = drawn(line(*np.linspace(5, 2, 200), 9e5), span=(1, 201))
    (aside,) = Page(text).text("p")
    assert re.fullmatch(
        r"1 value is above [\d.]+, up to 900,000, and drawn at the upper edge\.", aside
    )


def test_chart_is_read_aloud_with_its_ends():
    text = drawn(line(4.0, 2.5), line(9.0, label="raw", look="faint"))
    labels = [v for _, name, v in Page(text).attributes if name == "aria-label"]
    assert labels == ["Loss: train from 4 at step 1 to 2.5 at step 2"]


def test_marks_near_each_other_share_a_flag_with_all_their_texts():
    marks = [Mark(2.0, f"number {n}", "bad") for n in range(6)]
    marks += [Mark(2.0, "steps", "changed"), Mark(4.0, "far", "bad")]
    page = Page(drawn(line(1.0, 2.0, 3.0, 4.0), marks=marks))
    titles = [value for _, name, value in page.attributes if name == "title"]
    assert len(titles) == 3
    assert titles[0].splitlines() == [
        *(f"step 2: number {n}" for n in range(4)),
        "and 2 more",
    ]


def test_hostile_labels_stay_text():
    marks = [Mark(1.0, HOSTILE, "bad")]
    chart = Chart(HOSTILE, [line(1.0, label=HOSTILE)], marks, unit=HOSTILE)
    page = Page(draw_chart(chart, (1, 1)))
    assert {"script", "img"}.isdisjoint(page.tags)
    assert not page.open
    assert f"step 1: {HOSTILE}" in [v for _, n, v in page.attributes if n == "title"]
