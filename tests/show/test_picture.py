"""Does a picture show a plan's numbers to scale, name them, and lose none?"""

import dataclasses
import itertools
import struct
import sys

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_hex

from jaxpar.compiled.collectives import Collective
from jaxpar.show.bars import GREEN, INK, RED, SEEN, Bar, Piece, quantity
from jaxpar.show.panels import MOST_ROWS, memory_pieces, panels, time_pieces, verdict
from jaxpar.show.picture import as_svg, check_path, draw, headline, make_figure, styled
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

KINDS = (
    "parameters", "optimizer state", "other state", "batch", "compute copies",
    "gradients", "activations and other temporaries",
)  # fmt: skip


def panel(plan, name):
    """The axes of one panel."""
    with styled():
        return make_figure(plan, [name]).axes[0]


def words(axes) -> list[str]:
    """All that is written on axes, a text a string."""
    legend = axes.get_legend()
    keyed = [text.get_text() for text in legend.get_texts()] if legend else []
    return [text.get_text().replace("\n", " ") for text in axes.texts] + keyed


def lines(axes) -> dict[str, float]:
    """Colour -> where the upright lines are."""
    return {
        to_hex(line.get_color()[0]): line.get_segments()[0][0][0]
        for line in axes.collections
    }


def test_memory_bar_is_as_long_as_the_bytes_kind_behind_kind():
    bars = panel(make_plan(), "memory").patches
    bytes_ = [14 * GB, 28 * GB, 33, 64_000, 7 * GB, 14 * GB, 12 * GB]
    assert [bar.get_width() for bar in bars] == bytes_
    begins = [0, *itertools.accumulate(bytes_)][:-1]
    assert [bar.get_x() for bar in bars] == begins
    assert sum(bytes_) == MEMORY.state + MEMORY.batch + MEMORY.temporaries


def test_memory_hatches_what_is_derived_and_nothing_else():
    axes = panel(make_plan(), "memory")
    hatched = {
        name
        for name, bar in zip(KINDS, axes.patches, strict=True)
        if bar.get_hatch() is not None
    }
    assert hatched == set(KINDS[4:])
    assert any("hatched: derived" in text for text in words(axes))


def test_lines_are_at_the_peak_and_at_the_device_memory():
    axes = panel(make_plan(), "memory")
    found = sorted(line.get_segments()[0][0][0] for line in axes.collections)
    assert found == [75 * GB, 150 * GB]
    assert {"peak 75.0 GB", "device memory 150 GB"} <= set(words(axes))
    assert axes.get_xlim()[1] > 150 * GB
    assert (verdict(make_plan()), panels(make_plan())["memory"].colour) == (
        "fits: 75.0 GB of 150 GB are free",
        GREEN,
    )


def test_plan_that_does_not_fit_says_by_how_much_in_red():
    plan = make_plan(device_memory_bytes=60 * GB)
    axes = panel(plan, "memory")
    assert lines(axes) == {RED: 60 * GB, INK: 75 * GB}
    assert panels(plan)["memory"].finding == ("does not fit: 15.0 GB over 60.0 GB")
    assert panels(plan)["memory"].colour == RED
    over = axes.patches[-1]
    assert (over.get_x(), to_hex(over.get_facecolor())) == (60 * GB, RED)


def test_device_whose_memory_is_not_known_has_no_line():
    axes = panel(make_cpu_plan(), "memory")
    assert lines(axes) == {INK: 7_500_000}
    assert not any("device memory" in text for text in words(axes))
    assert verdict(make_cpu_plan()) == "peak 7.50 MB; the device's memory is unknown"


def test_parts_that_are_not_alive_at_once_are_told():
    early = dataclasses.replace(MEMORY, peak=60 * GB)
    told = [
        any("not all live at once" in text for text in words(panel(plan, "memory")))
        for plan in (make_plan(), make_plan(memory=early))
    ]
    assert told == [False, True]


@pytest.mark.parametrize("name", CASES)
def test_every_part_that_can_be_seen_is_named_once_with_its_number(name):
    plan = CASES[name]
    found = words(panel(plan, "memory"))
    whole = sum(piece.value for piece in memory_pieces(plan))
    for piece in memory_pieces(plan):
        text = f"{piece.name} {quantity(piece.value, 'B')}"
        assert found.count(text) == (piece.value > SEEN * whole)


def test_name_gives_way_to_a_line_through_it():
    pieces = [Piece("parameters", 4.0, INK), Piece("batch", 6.0, INK)]
    free, crossed = Bar(pieces, "B", 10.0), Bar(pieces, "B", 10.0, (2.1, 9.0))
    assert free.names == [["parameters", "4 B"], ["batch", "6 B"]]
    assert crossed.names == [[], ["batch", "6 B"]]
    assert crossed.key == {0: "parameters 4 B"}


def test_traffic_bars_are_the_bytes_that_a_device_sends():
    axes = panel(make_plan(), "traffic")
    sent = [round(26 * GB * 63 / 64), round(13 * GB * 63 / 64), round(48 * 63 / 64), 4]
    assert [bar.get_width() for bar in axes.patches] == sent
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "all-gather over data, bf16",
        "reduce-scatter over data, bf16",
        "all-reduce over data x tensor, f32",
        "collective-permute, f32",
    ]
    assert words(axes)[:2] == ["25.6 GB, 516 times", "12.8 GB, 259 times"]
    assert words(axes)[3] == "4 B, 1 time"
    finding = panels(make_plan())["traffic"].finding
    assert finding == "38.4 GB: 5.00 GB inside its host, 33.0 GB between hosts"
    assert panels(make_cpu_plan())["traffic"].finding == "38.4 GB"


def test_traffic_adds_up_groups_of_another_size():
    rows = [dataclasses.replace(COLLECTIVES[3], group_size=n) for n in (2, 4)]
    axes = panel(make_plan(program=make_program(*rows)), "traffic")
    assert [bar.get_width() for bar in axes.patches] == [8]
    assert words(axes) == ["8 B, 2 times"]


def test_traffic_of_many_rows_ends_in_the_sum_of_the_least():
    rows = [
        Collective("collective-permute", (f"axis{n}",), "f32", 2, 1, n * GB, GB)
        for n in range(1, MOST_ROWS + 6)
    ]
    axes = panel(make_plan(program=make_program(*rows)), "traffic")
    widths = [bar.get_width() for bar in axes.patches]
    assert len(widths) == MOST_ROWS
    assert axes.get_yticklabels()[-1].get_text() == "6 others"
    assert widths[-1] == sum(range(1, 7)) * GB
    assert sum(widths) == sum(row.sent_bytes for row in rows)


def test_traffic_of_nothing_says_so():
    plan = make_plan(program=make_program(), links=None)
    assert panels(plan)["traffic"].finding == "nothing"
    with styled():
        assert not make_figure(plan, ["traffic"]).axes


def test_time_bar_is_the_step():
    plan = make_plan()
    axes = panel(plan, "time")
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([3.0, 1.3, 0.2, 0.5])
    assert sum(p.value for p in time_pieces(ESTIMATE)) == pytest.approx(5.0)
    assert axes.get_xlim() == (0, 5.0)
    assert {
        "matmuls 3.00 s",
        "other kernels 1.30 s",
        "exposed communication 200 ms",
        "bubble 500 ms",
        "collectives take 800 ms, 600 ms of it overlapped",
    } == set(words(axes))
    assert panels(plan)["time"].finding == "5.00 s, MFU 41.2%, 200,000 tokens/s"
    silent = make_plan(tokens_per_step=None)
    assert panels(silent)["time"].finding == "5.00 s, MFU 41.2%"


def test_panels_are_those_that_there_are_numbers_for():
    assert list(panels(make_cpu_plan())) == ["memory", "traffic"]
    assert list(panels(make_plan())) == ["memory", "traffic", "time"]
    piped = make_piped_plan("gpipe", 2, 2)
    assert list(panels(piped)) == ["memory", "traffic", "time", "pipeline"]
    with styled():
        assert len(make_figure(piped).axes) == 4


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero bubble"])
def test_pipeline_is_its_chart_to_scale_a_row_a_stage(name):
    plan = CASES[name]
    axes = panel(plan, "pipeline")
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


def test_pipeline_has_numbers_where_they_can_be_read():
    few = words(panel(CASES["zero bubble"], "pipeline"))
    assert sorted(filter(str.isdigit, few)) == sorted([*"0123"] * 2 * 3)
    assert {"forward", "backward", "gradients of weights"} <= set(few)
    assert not any(map(str.isdigit, words(panel(CASES["1f1b"], "pipeline"))))
    assert "bubble 17.9%" in panels(CASES["1f1b"])["pipeline"].finding


@pytest.mark.parametrize("name", CASES)
def test_no_text_is_cut_off_or_lies_over_another(name):
    with styled():
        figure = make_figure(CASES[name])
        figure.draw_without_rendering()
    texts = list(figure.texts)
    for axes in figure.axes:
        low, high = axes.get_xlim()
        ticks = axes.get_xticklabels()
        texts += [tick for tick in ticks if low <= tick.get_position()[0] <= high]
        texts += [*axes.texts, *axes.get_yticklabels()]
        texts += axes.get_legend().get_texts() if axes.get_legend() else []
    places = [text.get_window_extent() for text in texts if text.get_text()]
    for place in places:
        assert place.x0 >= 0
        assert place.y0 >= 0
        assert place.x1 <= figure.bbox.width
        assert place.y1 <= figure.bbox.height
    for one, other in itertools.combinations(places, 2):
        assert not one.padded(-1).overlaps(other.padded(-1))


def test_heading_says_what_is_planned():
    assert headline(make_plan()) == (
        "h200:8x8: 64 devices",
        "data 64 x pipe 1 x tensor 1; ZeRO 3; bfloat16; 6,738,415,616 parameters; "
        "compiled for cuda",
    )
    assert headline(make_plan(num_devices=1))[0] == "h200:8x8: 1 device"
    with styled():
        written = [text.get_text() for text in make_figure(make_plan()).texts]
    assert set(headline(make_plan())) <= set(written)
    assert {"Memory of one device", "fits: 75.0 GB of 150 GB are free"} <= set(written)


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (999_499, "B", "999 kB"),
        (999_500, "B", "1.00 MB"),
        (141 * GB, "B", "141 GB"),
        (1.234e15, "B", "1,234 TB"),
        (0.0, "s", "0 s"),
        (0.9996, "s", "1.00 s"),
        (1234.0, "s", "1,234 s"),
        (0.000_123_4, "s", "123 µs"),
        (2e-9, "s", "2e-09 s"),
    ],
)
def test_quantity_has_three_digits_in_the_unit_of_its_size(number, unit, text):
    assert quantity(number, unit) == text


def test_png_is_1200_pixels_wide(tmp_path):
    draw(make_plan(), tmp_path / "plan.png")
    content = (tmp_path / "plan.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">I", content[16:20]) == (1200,)


@pytest.mark.parametrize(
    ("suffix", "begin"), [(".png", b"\x89PNG"), (".SVG", b"<?xml"), (".pdf", b"%PDF")]
)
def test_same_plan_gives_the_same_bytes_in_any_style(tmp_path, suffix, begin):
    plan = make_piped_plan("1f1b", 1, 2, estimate=None)
    first, second = (tmp_path / f"{n}{suffix}" for n in "ab")
    draw(plan, first)
    with mpl.rc_context({"font.size": 20.0, "axes.facecolor": "black"}):
        draw(plan, second)
        assert mpl.rcParams["font.size"] == 20.0
    assert first.read_bytes().startswith(begin)
    assert b"Date" not in first.read_bytes()
    assert first.read_bytes() == second.read_bytes()


def test_boxes_of_a_long_schedule_are_one_image_of_an_svg(monkeypatch):
    plan = make_piped_plan("gpipe", 2, 2)
    assert "<image" not in as_svg(plan, "pipeline")
    monkeypatch.setattr("jaxpar.show.panels.MOST_OUTLINES", 7)
    assert as_svg(plan, "pipeline").count("<image") >= 1


def test_dollars_are_dollars(tmp_path):
    draw(make_cpu_plan(precision="$x_{$"), tmp_path / "plan.svg")


def test_long_names_leave_room_for_their_bars():
    row = dataclasses.replace(COLLECTIVES[0], axes=("data", 100 * "x"))
    axes = panel(make_plan(program=make_program(row)), "traffic")
    (label,) = axes.get_yticklabels()
    assert label.get_text() == "all-gather over data x " + 34 * "x" + "..."
    assert axes.get_position().width > 0.35


@pytest.mark.parametrize("name", ["plan.jpeg", "plan.gif", "plan"])
def test_file_of_another_kind_is_refused(tmp_path, name):
    message = rf"path='.*{name}' must end in \.png or \.svg or \.pdf\."
    with pytest.raises(ValueError, match=message):
        draw(make_plan(), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*no'; make it"):
        check_path(tmp_path / "no" / "plan.png")


def test_missing_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = r"picture needs matplotlib, .* run pip install 'jaxpar\[plot\]', or leave"
    with pytest.raises(ModuleNotFoundError, match=message):
        draw(make_plan(), tmp_path / "plan.png")
    assert not list(tmp_path.iterdir())
