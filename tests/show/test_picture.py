"""Does a picture show a plan's numbers to scale, name them, and lose none?"""

import dataclasses
import itertools
import struct
import sys

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from jaxpar.compiled.collectives import Collective
from jaxpar.planner.sections import (
    headline,
    memory_pieces,
    quantity,
    sections,
    time_pieces,
    verdict,
)
from jaxpar.show.picture import MOODS, MOST_ROWS, RED, as_svg, draw
from jaxpar.show.plotting import INK
from jaxpar.show.schedule import COLOURS, boxes
from tests.planner.handmade import (
    CASES,
    COLLECTIVES,
    ESTIMATE,
    GB,
    MEMORY,
    make_cpu_plan,
    make_piped_plan,
    make_plan,
    make_program,
)

LONG = dataclasses.replace(COLLECTIVES[0], axes=("data", 100 * "x"))
MANY = [
    Collective("collective-permute", (f"axis{n}",), "f32", 2, 1, n * GB, GB)
    for n in range(1, MOST_ROWS + 6)
]
DRAWN = CASES | {
    "long names": make_plan(
        program=make_program(LONG, *COLLECTIVES), precision=20 * "p"
    ),
    "many rows": make_plan(program=make_program(*MANY)),
    "64 stages": make_piped_plan("1f1b", 64, 128),
    "a stage": make_piped_plan("gpipe", 1, 2),
}


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a plan: its figure and, by name, its panels."""

    def make(plan):
        figures = []

        def keep(figure, *_):
            figure.draw_without_rendering()
            figures.append(figure)

        monkeypatch.setattr("jaxpar.show.picture.save", keep)
        draw(plan, tmp_path / "plan.png")
        names = [section.name for section in sections(plan)]
        panels = dict(zip(names, figures[0].subfigs[1:], strict=True))
        return figures[0], panels

    return make


@pytest.fixture
def panel(drawn):
    """Draws a plan: one panel."""
    return lambda plan, name: drawn(plan)[1][name]


def words(panel) -> list[str]:
    """The texts of a panel, the ticks apart."""
    texts = [*panel.axes[0].texts, *panel.axes[0].get_yticklabels()]
    texts += [text for legend in panel.legends for text in legend.get_texts()]
    found = [text.get_text() for text in texts]
    return [*found, panel.axes[0].get_xlabel(), panel.get_suptitle()]


def bars(panel) -> list[Rectangle]:
    return [bar for stack in panel.axes[0].containers for bar in stack]


def lines(panel) -> dict[str, float]:
    """Label -> where the upright lines are."""
    return {line.get_label(): line.get_xdata()[0] for line in panel.axes[0].lines}


def texts_of(figure) -> list:
    """All that is written on a figure."""
    found = [figure._suptitle]
    for part in figure.subfigs:
        found += texts_of(part)
    for axes in figure.axes if not figure.subfigs else ():
        low, high = axes.get_xlim()
        ticks = axes.get_xticklabels()
        found += [tick for tick in ticks if low <= tick.get_position()[0] <= high]
        found += [*axes.texts, *axes.get_yticklabels(), axes.xaxis.label]
    found += [text for legend in figure.legends for text in legend.get_texts()]
    return [text for text in found if text is not None and text.get_text()]


def test_memory_bar_is_as_long_as_the_bytes_kind_behind_kind(panel):
    bytes_ = [14 * GB, 28 * GB, 33, 64_000, 7 * GB, 14 * GB, 12 * GB]
    found = bars(panel(make_plan(), "memory"))
    assert [bar.get_width() for bar in found] == bytes_
    begins = [0, *itertools.accumulate(bytes_)][:-1]
    assert [bar.get_x() for bar in found] == begins
    assert sum(bytes_) == MEMORY.state + MEMORY.batch + MEMORY.temporaries


def test_memory_hatches_what_is_derived_and_nothing_else(panel):
    found = panel(make_plan(), "memory")
    hatched = [bar.get_hatch() is not None for bar in bars(found)]
    assert hatched == [piece.derived for piece in memory_pieces(make_plan())]
    assert hatched == 4 * [False] + 3 * [True]
    assert any("hatched: derived" in text for text in words(found))


def test_lines_are_at_the_peak_and_at_the_device_memory(panel):
    found = panel(make_plan(), "memory")
    assert lines(found) == {"peak 75.0 GB": 75 * GB, "device memory 150 GB": 150 * GB}
    assert set(lines(found)) <= set(words(found))
    assert found.axes[0].get_xlim()[1] > 150 * GB
    assert verdict(make_plan()) == "fits: 75.0 GB of 150 GB are free"
    beside = dataclasses.replace(MEMORY, host_state=42 * GB)
    said = verdict(make_plan(memory=beside))
    assert said == "fits: 75.0 GB of 150 GB are free; 42.0 GB a device in host memory"
    assert found._suptitle.get_color() == MOODS[True]
    assert found.get_suptitle() == f"Memory of one device — {verdict(make_plan())}"


def test_plan_that_does_not_fit_says_by_how_much_in_red(panel):
    found = panel(make_plan(device_memory_bytes=60 * GB), "memory")
    assert lines(found) == {"peak 75.0 GB": 75 * GB, "device memory 60.0 GB": 60 * GB}
    assert [line.get_color() for line in found.axes[0].lines] == [INK, RED]
    assert found._suptitle.get_color() == RED
    assert found.get_suptitle().endswith("does not fit: 15.0 GB over 60.0 GB")
    over = found.axes[0].patches[-1]
    assert (over.get_x(), to_hex(over.get_facecolor())) == (60 * GB, RED)


def test_device_whose_memory_is_not_known_has_no_line(panel):
    found = panel(make_cpu_plan(), "memory")
    assert lines(found) == {"peak 7.50 MB": 7_500_000}
    assert verdict(make_cpu_plan()) == "peak 7.50 MB; the device's memory is unknown"
    assert verdict(make_cpu_plan()) in found.get_suptitle()


def test_parts_that_are_not_alive_at_once_are_told(panel):
    early = dataclasses.replace(MEMORY, peak=60 * GB)
    told = [
        any("not all live at once" in text for text in words(panel(plan, "memory")))
        for plan in (make_plan(), make_plan(memory=early))
    ]
    assert told == [False, True]


@pytest.mark.parametrize("name", CASES)
def test_every_part_is_named_once_with_its_number(name, panel):
    plan = CASES[name]
    found = words(panel(plan, "memory"))
    for piece in memory_pieces(plan):
        text = f"{piece.name} {quantity(piece.value, 'B')}"
        assert found.count(text) == (piece.value > 0)


def test_traffic_bars_are_the_bytes_that_a_device_sends(panel):
    found = panel(make_plan(), "traffic")
    sent = [round(26 * GB * 63 / 64), round(13 * GB * 63 / 64), round(48 * 63 / 64), 4]
    assert [bar.get_width() for bar in bars(found)] == sent
    assert [label.get_text() for label in found.axes[0].get_yticklabels()] == [
        "all-gather over data, bf16",
        "reduce-scatter over data, bf16",
        "all-reduce over data x tensor, f32",
        "collective-permute, f32",
    ]
    assert words(found)[:2] == ["25.6 GB, 516 times", "12.8 GB, 259 times"]
    assert words(found)[3] == "4 B, 1 time"
    finding = "38.4 GB: 5.00 GB inside its host, 33.0 GB between hosts"
    assert found.get_suptitle().endswith(f" — {finding}")
    assert panel(make_cpu_plan(), "traffic").get_suptitle().endswith(" — 38.4 GB")


def test_traffic_adds_up_groups_of_another_size(panel):
    rows = [dataclasses.replace(COLLECTIVES[3], group_size=n) for n in (2, 4)]
    found = panel(make_plan(program=make_program(*rows)), "traffic")
    assert [bar.get_width() for bar in bars(found)] == [8]
    assert words(found)[0] == "8 B, 2 times"


def test_traffic_of_many_rows_ends_in_the_sum_of_the_least(panel):
    found = panel(DRAWN["many rows"], "traffic")
    widths = [bar.get_width() for bar in bars(found)]
    assert len(widths) == MOST_ROWS
    assert found.axes[0].get_yticklabels()[-1].get_text() == "6 others"
    assert widths[-1] == sum(range(1, 7)) * GB
    assert sum(widths) == sum(row.sent_bytes for row in MANY)


def test_traffic_of_nothing_says_so(panel):
    found = panel(make_plan(program=make_program(), links=None), "traffic")
    assert found.get_suptitle().endswith("nothing: the program has no collective")
    assert not found.axes


def test_time_bar_is_the_step(panel):
    found = panel(make_plan(), "time")
    assert [bar.get_width() for bar in bars(found)] == pytest.approx(
        [3.0, 1.3, 0.2, 0.5]
    )
    assert sum(p.value for p in time_pieces(ESTIMATE)) == pytest.approx(5.0)
    assert found.axes[0].get_xlim() == (0, 5.0)
    assert {
        "matmuls 3.00 s",
        "other kernels 1.30 s",
        "exposed communication 200 ms",
        "bubble 500 ms",
        "collectives take 800 ms, 600 ms of it overlapped",
    } <= set(words(found))
    assert found.get_suptitle().endswith(" — 5.00 s, MFU 41.2%, 200,000 tokens/s")
    silent = panel(make_plan(tokens_per_step=None), "time")
    assert silent.get_suptitle().endswith(" — 5.00 s, MFU 41.2%")


def test_panels_are_those_that_there_are_numbers_for(drawn):
    for plan, expected in (
        (make_cpu_plan(), ["memory", "traffic"]),
        (make_plan(), ["memory", "traffic", "time"]),
        (make_piped_plan("gpipe", 2, 2), ["memory", "traffic", "time", "pipeline"]),
    ):
        panels = drawn(plan)[1].items()
        assert [name for name, found in panels if found.axes] == expected


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero bubble"])
def test_pipeline_is_its_chart_to_scale_a_row_a_stage(name, panel):
    plan = CASES[name]
    (axes,) = panel(plan, "pipeline").axes
    drawn = []
    for lane in axes.collections:
        for path, colour in zip(lane.get_paths(), lane.get_facecolor(), strict=True):
            low, high = path.get_extents().get_points()
            stage = round((low[1] + high[1]) / 2)
            drawn.append((stage, to_hex(colour), low[0], high[0] - low[0], colour[3]))
    chunks = plan.schedule.num_chunks
    expected = [
        (b.stage, COLOURS[b.work], b.begin, b.length, 1 - 0.6 * b.chunk / chunks)
        for b in boxes(plan.schedule, plan.schedule_times)
    ]
    assert len(drawn) == len(expected)
    for got, want in zip(sorted(drawn), sorted(expected), strict=True):
        assert got[:2] == want[:2]
        np.testing.assert_allclose(got[2:], want[2:], atol=1e-9)  # Float64 sums.
    stages = [label.get_text() for label in axes.get_yticklabels()]
    assert stages == [f"stage {n}" for n in range(plan.schedule.num_stages)]


def test_pipeline_has_numbers_where_they_can_be_read(panel):
    few = words(panel(CASES["zero bubble"], "pipeline"))
    assert sorted(filter(str.isdigit, few)) == sorted([*"0123"] * 2 * 3)
    assert {"forward", "backward", "gradients of weights"} <= set(few)
    many = words(panel(CASES["1f1b"], "pipeline"))
    assert not any(map(str.isdigit, many))
    assert "Pipeline, 1f1b: 8 stages, 32 micro-batches — bubble 17.9%" in many


@pytest.mark.parametrize("name", DRAWN)
def test_no_text_is_cut_off_or_lies_over_another(name, drawn):
    figure, _ = drawn(DRAWN[name])
    places = [text.get_window_extent() for text in texts_of(figure)]
    assert len(places) > 20
    for place in places:
        assert place.x0 >= 0
        assert place.y0 >= 0
        assert place.x1 <= figure.bbox.width
        assert place.y1 <= figure.bbox.height
    for one, other in itertools.combinations(places, 2):
        assert not one.padded(-1).overlaps(other.padded(-1))


def test_heading_says_what_is_planned(drawn):
    written = [text.get_text() for text in texts_of(drawn(make_plan())[0])]
    assert set(headline(make_plan())) <= set(written)


def test_png_is_1200_pixels_wide(tmp_path):
    draw(make_plan(), tmp_path / "plan.png")
    content = (tmp_path / "plan.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">I", content[16:20]) == (1200,)


def test_boxes_of_a_long_schedule_are_one_image_of_an_svg(monkeypatch):
    plan = make_piped_plan("gpipe", 2, 2)
    assert "<image" not in as_svg(plan, "pipeline")
    monkeypatch.setattr("jaxpar.show.schedule.MOST_OUTLINES", 7)
    assert as_svg(plan, "pipeline").count("<image") >= 1


def test_dollars_are_dollars(tmp_path):
    draw(make_cpu_plan(precision="$x_{$"), tmp_path / "plan.svg")


def test_long_names_leave_room_for_their_bars(panel):
    (axes,) = panel(DRAWN["long names"], "traffic").axes
    label = axes.get_yticklabels()[0].get_text()
    assert label == "all-gather over data x " + 34 * "x" + "..."
    assert axes.get_position().width > 0.35


@pytest.mark.parametrize("name", ["plan.jpeg", "plan"])
def test_file_of_another_kind_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=rf"path='.*{name}' must end in"):
        draw(make_plan(), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = r"picture needs matplotlib, .*: pip install 'jaxpar\[plot\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        draw(make_plan(), tmp_path / "plan.png")
    assert not list(tmp_path.iterdir())
