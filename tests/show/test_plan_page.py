"""Is a plan's page whole: every number, valid JSON, and nothing from elsewhere?"""

import dataclasses
import functools
import json
import re
import sys

import jax
import pytest

from jaxpar.planner.sections import memory_pieces, verdict
from jaxpar.show.plan_page import as_html, write_html
from tests.planner.handmade import (
    CASES,
    COLLECTIVES,
    GB,
    make_cpu_plan,
    make_plan,
    make_program,
)
from tests.show.pages import HOSTILE, Page


@functools.cache
def html_of(name) -> str:
    return as_html(CASES[name], tokens=1e12)


@pytest.mark.parametrize("name", CASES)
def test_page_is_closed_and_needs_nothing_else(name):
    text = html_of(name)
    page = Page(text)
    assert not page.open
    assert not {"link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert [a for a in page.attributes if a[0] == "script"] == [
        ("script", "type", "application/json"),
        ("script", "id", "plan"),
    ]
    assert not re.search(r"@import|url\((?!#)|https?:", text)
    links = [a for a in page.attributes if a[1] in ("src", "href", "xlink:href")]
    assert all(link.startswith(("#", "data:image/png")) for *_, link in links)


def test_ids_of_the_panels_are_apart_and_are_all_there():
    text = html_of("zero bubble")
    ids = [value for _, name, value in Page(text).attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:href="|url\()#([^")]+)', text)
    assert used
    assert set(used) <= set(ids)


@pytest.mark.parametrize("name", CASES)
def test_json_of_the_page_is_the_plan(name):
    (text,) = Page(html_of(name)).text("script")
    assert json.loads(text) == json.loads(CASES[name].as_json())


@pytest.mark.parametrize(
    ("name", "mood"), [("fits", "fits"), ("does not fit", "over"), ("cpu", "")]
)
def test_page_begins_with_the_verdict(name, mood):
    page, plan = Page(html_of(name)), CASES[name]
    assert page.text("h1") == [f"{plan.target}: {plan.num_devices} devices"]
    assert next(a for a in page.attributes if a[1] == "class") == ("p", "class", mood)
    assert page.text("p")[1] == verdict(plan)


def test_tables_have_every_number():
    plan, rows = CASES["fits"], Page(html_of("fits")).rows
    kinds = {row[0]: row[1:] for row in rows if row}
    for piece in memory_pieces(plan):
        by = "derived" if piece.derived else "compiled"
        assert kinds[piece.name][0] == by
        assert kinds[piece.name][2] == f"{piece.value:,}"
    assert kinds["peak"] == ["compiled", "75.0 GB", "75,000,000,000", "50.0%"]
    assert kinds["temporaries, total"][1] == "33.0 GB"
    assert kinds["device"][:2] == ["hardware", "150 GB"]
    gathers = ["all-gather", "data", "bf16", "516", "64", "26.0 GB", "25.6 GB"]
    assert gathers in rows
    assert ["collective-permute", "none", "f32", "1", "2", "4 B", "4 B"] in rows
    assert kinds["with recomputation"] == ["5e+16, 25% more"]
    assert kinds["compiled in"] == ["60.0 s"]
    assert kinds["collectives"] == ["800 ms"]
    assert kinds["exposed communication"] == ["200 ms"]
    assert kinds["bubble"] == ["500 ms"]
    assert kinds["device-hours of 1e+12 tokens"] == ["88,889"]
    assert Page(html_of("fits")).text("p")[2:] == [
        "38.4 GB: 5.00 GB inside its host, 33.0 GB between hosts",
        "5.00 s, MFU 41.2%, 200,000 tokens/s",
    ]


def test_padding_is_told():
    memory = dataclasses.replace(make_plan().memory, padding=3 * GB)
    rows = Page(as_html(make_plan(memory=memory))).rows
    padding = ["padding, of the state", "derived", "3.00 GB", "3,000,000,000", "2.0%"]
    assert padding in rows


def test_page_of_cpus_has_no_estimate_and_says_why():
    page = Page(html_of("cpu"))
    assert page.tags.count("svg") == 2
    assert "no estimate: the rates of these devices are unknown" in page.text("p")
    assert not [row for row in page.rows if row[:1] == ["device"]]
    assert page.text("li") == list(CASES["cpu"].notes)


def test_page_of_a_step_without_collectives_says_so():
    page = Page(html_of("nothing crosses"))
    assert page.tags.count("svg") == 1
    assert "nothing: the program has no collective" in page.text("p")


def test_page_has_notes_assumptions_and_versions():
    page = Page(html_of("1f1b"))
    assert page.tags.count("svg") == 4
    assert "attention is XLA's own" in page.text("li")
    assert any("GB/s inside its host" in text for text in page.text("li"))
    assert "Pipeline, 1f1b: 8 stages, 32 micro-batches" in page.text("h2")
    (footer,) = page.text("footer")
    assert f"jax {jax.__version__}" in footer


def test_hostile_words_stay_words():
    row = dataclasses.replace(COLLECTIVES[0], axes=(HOSTILE,), kind=HOSTILE)
    plan = make_plan(
        target=HOSTILE,
        compiled_for=HOSTILE,
        precision=HOSTILE,
        mesh={HOSTILE: 8},
        notes=(HOSTILE,),
        program=make_program(row),
        estimate=None,  # Whose assumptions are the target's, which must be one.
    )
    page = Page(as_html(plan))
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert HOSTILE in page.text("li")
    assert [HOSTILE, HOSTILE, "bf16", "516", "64", "26.0 GB", "26.0 GB"] in page.rows
    (text,) = page.text("script")
    assert json.loads(text)["notes"] == [HOSTILE]


def test_page_is_written_as_utf_8_and_is_the_same_each_time(tmp_path):
    plan = make_cpu_plan(notes=("µs",))
    write_html(plan, tmp_path / "plan.html", tokens=1e9)
    content = (tmp_path / "plan.html").read_bytes()
    assert content.decode("utf-8") == as_html(plan, tokens=1e9)
    assert 'charset="utf-8"' in content[:100].decode()


def test_file_of_another_kind_is_refused(tmp_path):
    message = r"path='.*plan\.json' must end in \.html or \.htm\."
    with pytest.raises(ValueError, match=message):
        write_html(make_plan(), tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = r"needs matplotlib, .*: pip install 'jaxpar\[plot\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        write_html(make_plan(), tmp_path / "plan.html")
    assert not list(tmp_path.iterdir())
