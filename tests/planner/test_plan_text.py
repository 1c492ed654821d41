"""Does the terminal say what a plan holds, and nothing that is not there?"""

import dataclasses

import pytest
from rich.console import Console

from jaxpar.planner.plan_text import show_plan
from jaxpar.planner.sections import memory_pieces
from tests.planner.handmade import (
    CASES,
    GB,
    MEMORY,
    make_cpu_plan,
    make_piped_plan,
    make_plan,
)


def shown(plan, capsys, width=100, **options) -> str:
    show_plan(plan, Console(width=width), **options)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_plan_can_be_shown_narrow_and_wide(name, capsys):
    for width in (60, 80, 160):
        lines = shown(CASES[name], capsys, width).splitlines()
        assert max(map(len, lines)) <= width


def test_print_of_a_plan_is_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    for plan in CASES.values():
        assert f"{plan}\n" == shown(plan, capsys)
        assert plan._repr_mimebundle_() == {"text/plain": str(plan)}
    assert repr(make_plan(device_memory_bytes=60 * GB)) == (
        "<Plan: h200:8x8, data 64 x pipe 1 x tensor 1, ZeRO 3, 6,738,415,616 "
        "parameters, peak 75,000,000,000 bytes, does not fit>"
    )


def test_verdict_links_and_cost_are_told(capsys):
    said = shown(make_plan(), capsys, tokens=1e12)
    assert "fits: 75.0 GB of 150 GB are free" in said
    assert "38.4 GB: 5.00 GB inside its host, 33.0 GB between hosts" in said
    # 1e12 tokens at 1e6 in 5 s, on 64 devices.
    (row,) = [line for line in said.splitlines() if "device-hours" in line]
    assert row.split() == ["device-hours", "of", "1e+12", "tokens", "88,889"]
    over = shown(make_plan(device_memory_bytes=60 * GB), capsys)
    assert "does not fit: 15.0 GB over 60.0 GB" in over
    assert "the device's memory is unknown" in shown(make_cpu_plan(), capsys)


def test_kinds_of_memory_are_those_of_the_picture(capsys):
    plan = make_plan()
    said = shown(plan, capsys)
    for piece in memory_pieces(plan):
        assert (piece.name in said) == (piece.value > 0)


def test_padding_is_a_row_of_its_own_where_there_is_some(capsys):
    assert "padding" not in shown(make_plan(), capsys)
    padded = dataclasses.replace(MEMORY, padding=3 * GB)
    (row,) = [
        line
        for line in shown(make_plan(memory=padded), capsys).splitlines()
        if "padding" in line
    ]
    assert "3.00" in row


def test_schedule_is_charted_where_it_fits(capsys):
    said = shown(make_piped_plan("1f1b", 2, 4), capsys)
    assert "stage 1 F" in said
    assert "--png and --html draw it" in shown(make_piped_plan("1f1b", 8, 64), capsys)
    assert "stage 1 F" not in shown(make_plan(), capsys)
