"""Are a plan's headings, findings and tables true of its numbers?"""

import dataclasses

import pytest

from jaxpar.compiled.exposed import Communication, Waited
from jaxpar.planner.roofline import assumptions
from jaxpar.planner.sections import (
    headline,
    memory_pieces,
    notes,
    quantity,
    sections,
    time_pieces,
    verdict,
)
from jaxpar.planner.targets import parse_target
from jaxpar.step.update import HostTraffic
from tests.planner.handmade import (
    CASES,
    ESTIMATE,
    GB,
    MEMORY,
    make_cpu_plan,
    make_piped_plan,
    make_plan,
    make_program,
)


def section(plan, name, tokens=None):
    (found,) = [each for each in sections(plan, tokens) if each.name == name]
    return found


@pytest.mark.parametrize("name", CASES)
def test_tables_are_whole(name):
    for each in sections(CASES[name], tokens=1e12):
        assert all(len(row) == len(each.head) for row in each.rows)
        assert len(each.fractions) in (0, len(each.rows))
        assert each.words <= len(each.head) or not each.rows


@pytest.mark.parametrize("name", CASES)
def test_pieces_add_up(name):
    plan = CASES[name]
    memory = plan.memory
    whole = memory.state + memory.batch + memory.temporaries
    assert sum(piece.value for piece in memory_pieces(plan)) == whole
    if plan.estimate is not None:
        found = sum(piece.value for piece in time_pieces(plan.estimate))
        assert found == pytest.approx(plan.estimate.step_seconds)


def test_exposed_communication_has_a_section_where_a_schedule_says_it():
    waited = Waited("g", "all-gather", ("data",), 3, False, 8_000_000, 0.008, 0.002)
    scheduled = dataclasses.replace(
        make_program(), communication=Communication(0.5, (waited,), 8)
    )
    plan = make_plan(program=scheduled)
    names = ["memory", "traffic", "exposed", "time"]
    assert [each.name for each in sections(plan)] == names
    found = section(plan, "exposed")
    assert found.finding == "2.0 of 8.0 ms of communication are exposed"
    assert found.rows == (("all-gather", "data", "3", "0", "8.0", "8.0", "2.0"),)
    assert notes(plan)[-1].startswith("a collective overlaps with the kernels")
    assert plan.as_dict()["exposed"] == [
        {
            "op": "all-gather",
            "axis": "data",
            "count": 3,
            "sync": 0,
            "sent_bytes": 8_000_000,
            "wire_seconds": 0.008,
            "exposed_seconds": 0.002,
        }
    ]
    assert make_plan().as_dict()["exposed"] is None


def test_pipeline_has_a_section_where_there_is_one():
    names = ["memory", "traffic", "time"]
    assert [each.name for each in sections(make_plan())] == names
    piped = make_piped_plan("1f1b", 8, 32)
    assert [each.name for each in sections(piped)] == [*names, "pipeline"]
    found = section(piped, "pipeline")
    assert found.heading == "Pipeline, 1f1b: 8 stages, 32 micro-batches"
    assert found.finding == f"bubble {7 / (32 + 7):.1%}"


@pytest.mark.parametrize(
    ("whole", "fits", "text"),
    [
        (150 * GB, True, "fits: 75.0 GB of 150 GB are free"),
        (75 * GB, True, "fits: 0 B of 75.0 GB are free"),
        (60 * GB, False, "does not fit: 15.0 GB over 60.0 GB"),
        (None, None, "peak 75.0 GB; the device's memory is unknown"),
    ],
)
def test_verdict_says_whether_it_fits_and_by_how_much(whole, fits, text):
    plan = make_plan(device_memory_bytes=whole)
    assert verdict(plan) == text
    assert section(plan, "memory").finding == text
    assert section(plan, "memory").fits is fits


def test_memory_is_a_share_of_the_device_or_of_the_peak():
    for plan, whole in (
        (make_plan(), 150 * GB),
        (make_plan(device_memory_bytes=None), 75 * GB),
    ):
        found = section(plan, "memory")
        (row,) = [n for n, row in enumerate(found.rows) if row[0] == "parameters"]
        assert found.fractions[row] == 14 * GB / whole
        assert found.rows[row][-1] == f"{14 * GB / whole:.1%}"


def test_memory_leaves_out_what_is_nothing():
    names = [row[0] for row in section(make_plan(), "memory").rows]
    assert "padding, of the state" not in names
    padded = make_plan(memory=dataclasses.replace(MEMORY, padding=3 * GB))
    (row,) = [r for r in section(padded, "memory").rows if r[0].startswith("padding")]
    assert row[2] == "3.00 GB"


def test_traffic_is_split_by_host_where_links_are_known():
    finding = section(make_plan(), "traffic").finding
    assert finding == "38.4 GB: 5.00 GB inside its host, 33.0 GB between hosts"
    assert section(make_cpu_plan(), "traffic").finding == "38.4 GB"
    nothing = section(make_cpu_plan(program=make_program()), "traffic")
    assert nothing.finding == "nothing: the program has no collective"
    assert not nothing.rows


def test_time_is_estimated_where_rates_are_known():
    finding = section(make_plan(), "time").finding
    assert finding == "5.00 s, MFU 41.2%, 200,000 tokens/s"
    unknown = section(make_plan(estimate=None), "time")
    assert unknown.finding == "no estimate: the rates of these devices are unknown"
    silent = section(make_plan(tokens_per_step=None), "time", tokens=1e12)
    assert silent.finding == f"5.00 s, MFU {ESTIMATE.mfu:.1%}"
    assert not [row for row in silent.rows if row[0].startswith("device-hours")]


def test_cost_of_a_run_is_in_device_hours():
    """10^12 tokens at 10^6 in 5 s, on 64 devices."""
    row = section(make_plan(), "time", tokens=1e12).rows[-1]
    assert row == ("device-hours of 1e+12 tokens", f"{1e6 * 5 / 3600 * 64:,.0f}")


def test_heading_names_target_mesh_and_stage():
    assert headline(make_plan()) == (
        "h200:8x8: 64 devices",
        "data 64 x pipe 1 x tensor 1; ZeRO 3; bfloat16; 6,738,415,616 parameters; "
        "compiled for cuda",
    )
    assert headline(make_plan(num_devices=1))[0] == "h200:8x8: 1 device"


def test_notes_have_the_assumptions_of_an_estimate():
    assert notes(make_cpu_plan()) == ["attention is XLA's own"]
    target = parse_target("h200:8x8")
    assert notes(make_plan()) == [
        "attention is XLA's own",
        *assumptions(target, is_scheduled=False),
    ]


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


def test_the_verdict_counts_the_host_too():
    memory = dataclasses.replace(make_plan().memory, host_state=90 * 10**9)
    plan = make_plan(memory=memory, host_memory_bytes=256 * 10**9)
    assert plan.fits
    assert "90.0 GB of 256 GB a device in host memory" in verdict(plan)
    small = make_plan(memory=memory, host_memory_bytes=64 * 10**9)
    assert not small.fits
    assert verdict(small) == "does not fit; 90.0 GB of 64.0 GB a device in host memory"


def test_the_verdict_and_the_time_have_the_host_s_work() -> None:
    host = HostTraffic(memory=10**9, disk=2 * 10**9, on_disk=10**9)
    assert "1.00 GB a device on disk" in verdict(make_plan(host=host))
